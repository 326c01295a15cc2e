"""Renders the results of the GPU check: one line while it runs, and a table at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu_check.case import GpuCheckOutcome, GpuCheckResult

_MAX_WIDTH = 110
_SYMBOLS = {GpuCheckOutcome.PASSED: "ok", GpuCheckOutcome.FAILED: "FAILED", GpuCheckOutcome.SKIPPED: "skipped"}


def render_line(result: GpuCheckResult) -> str:
    """Return one line with outcome, duration, name and reason, followed by the end of the log of a failed case."""
    line = f"{_SYMBOLS[result.outcome]:<8} {result.seconds:6.1f} s  {result.case}"
    tail = [f"    {entry}" for entry in result.facts.get("log", ())]
    return "\n".join([f"{line}: {result.reason}" if result.reason else line, *tail])


def render_table(results: Sequence[GpuCheckResult]) -> str:
    """Return a table of all cases with what they recorded, and the numbers of outcomes."""
    width = max((len(result.case) for result in results), default=0)
    lines = []
    for result in results:
        head = f"{_SYMBOLS[result.outcome]:<8} {result.case:<{width}} {result.seconds:6.1f} s"
        lines.append(f"{head}  {result.reason}".rstrip())
        lines += [f"{'':<11}{line}" for line in render_facts(result.facts)]
    counts = {outcome: sum(result.outcome is outcome for result in results) for outcome in GpuCheckOutcome}
    return "\n".join([*lines, ", ".join(f"{count} {outcome}" for outcome, count in counts.items())])


def render_facts(facts: Mapping[str, Any]) -> list[str]:
    """Return one line per fact; long values are cut, because the results file contains all of them."""
    return [
        f"{name.replace('_', ' ')}: {render_value(value)}"[:_MAX_WIDTH]
        for name, value in facts.items()
        if name != "log"
    ]


def render_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return f"[{', '.join(render_value(entry) for entry in value)}]"
    if isinstance(value, dict):
        return ", ".join(f"{name} {render_value(entry)}" for name, entry in value.items())
    return value if isinstance(value, str) else json.dumps(value)
