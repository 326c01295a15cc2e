"""Runs the cases of a part one after the other, each in its own process with a time limit.

Uses the standard library only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.case import CUDA, EXIT_PASSED, EXIT_SKIPPED, GpuCheckCase, GpuCheckOutcome, GpuCheckResult
from benchmarks.gpu_check.marked_processes import MARKER, kill_marked_processes

MIN_REMAINING_SECONDS = 15.0  # no case can pass in less time
SMALL_LIMIT_FACTOR = 6  # imports take much longer on the few cores of a machine without GPU
_TAIL_LINES = 15


@dataclass(frozen=True)
class RunSettings:
    """Folders, environment and total time of a run."""

    scratch: Path
    results: Path  # folder of the JSON lines and logs
    part: int
    small: bool
    machine: Mapping[str, Any]  # output of benchmarks.trainer.machine
    environment: Mapping[str, str]
    total_seconds: float

    @property
    def results_file(self) -> Path:
        return self.results / f"part-{self.part}.jsonl"

    @property
    def logs(self) -> Path:
        return self.results / f"part-{self.part}-logs"


def run_cases(cases: Iterable[GpuCheckCase], settings: RunSettings) -> Iterator[GpuCheckResult]:
    """Run the cases and yield their results, each of which is written to the results file first."""
    settings.logs.mkdir(parents=True, exist_ok=True)
    append_line(settings.results_file, {"part": settings.part, "machine": dict(settings.machine)})
    deadline = time.monotonic() + settings.total_seconds
    for case in cases:
        remaining = deadline - time.monotonic()
        if reason := find_skip_reason(case, settings, remaining=remaining):
            result = GpuCheckResult(case.name, GpuCheckOutcome.SKIPPED, reason=reason)
        else:
            limit = case.limit_seconds * (SMALL_LIMIT_FACTOR if settings.small else 1)
            result = run_case(case, settings, limit_seconds=min(limit, remaining))
        append_line(settings.results_file, asdict(result))
        yield result


def find_skip_reason(case: GpuCheckCase, settings: RunSettings, *, remaining: float) -> str:
    """Return why the case cannot run here, or an empty string."""
    if CUDA in case.requires and not settings.machine["cuda"]:
        return "requires CUDA"
    modules = settings.machine["modules"]
    missing = [name for name in case.requires if name != CUDA and not modules.get(name)]
    if missing:
        return f"requires {', '.join(missing)}"
    return f"the {settings.total_seconds:.0f} s of this part are used up" if remaining < MIN_REMAINING_SECONDS else ""


def run_case(case: GpuCheckCase, settings: RunSettings, *, limit_seconds: float) -> GpuCheckResult:
    """Run a case in its own process; kill it with all processes that it started when the time limit is reached."""
    slug = "".join(letter if letter.isalnum() else "-" for letter in case.name)
    facts_file, case_file = settings.logs / f"{slug}.facts.jsonl", settings.scratch / f"{slug}.json"
    facts_file.write_text("")
    folders = {"scratch": settings.scratch, "logs": settings.logs, "facts_file": facts_file}
    description = {"case": asdict(case), "small": settings.small, "on_gpu": settings.machine["cuda"]}
    description["folders"] = {name: str(path) for name, path in folders.items()}
    case_file.write_text(json.dumps(description))
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    command = [sys.executable, "-m", "benchmarks.gpu_check.case_process", str(case_file)]
    environment = {**settings.environment, MARKER: mark, "TMPDIR": str(settings.scratch)}
    started_at = time.monotonic()
    log = settings.logs / f"{slug}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            process.wait(timeout=limit_seconds)
        except subprocess.TimeoutExpired:
            pass  # killed below
        finally:
            timed_out = process.poll() is None
            kill_marked_processes(mark)
            process.wait()
    seconds = time.monotonic() - started_at
    facts = read_facts(facts_file)
    if timed_out:
        reason = f"exceeded its time limit of {limit_seconds:.0f} s"
        return GpuCheckResult(case.name, GpuCheckOutcome.FAILED, seconds, reason, {**facts, "log": read_tail(log)})
    return judge_exit(case, process.returncode, seconds, facts, log)


def judge_exit(case: GpuCheckCase, code: int, seconds: float, facts: dict[str, Any], log: Path) -> GpuCheckResult:
    """Return the result of a case whose process ended by itself."""
    reason = facts.pop("reason", "")
    if code == EXIT_PASSED:
        return GpuCheckResult(case.name, GpuCheckOutcome.PASSED, seconds, facts=facts)
    if code == EXIT_SKIPPED:
        return GpuCheckResult(case.name, GpuCheckOutcome.SKIPPED, seconds, reason, facts)
    reason = reason or f"its process ended with {code}"
    return GpuCheckResult(case.name, GpuCheckOutcome.FAILED, seconds, reason, {**facts, "log": read_tail(log)})


def read_facts(file: Path) -> dict[str, Any]:
    """Return all complete facts; a killed process may leave a partial last line."""
    facts: dict[str, Any] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            facts.update(json.loads(line))
        except ValueError:
            continue
    return facts


def append_line(file: Path, line: Mapping[str, Any]) -> None:
    """Append a JSON line and write it to the disk, so that a killed call leaves the finished cases."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(line) + "\n")
        lines.flush()
        os.fsync(lines.fileno())


def read_tail(log: Path) -> list[str]:
    return log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
