"""Figures of the queue benchmark, as a table and as JSON."""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.queue.job_plans import PRIORITIES, QueuedJob
from benchmarks.queue.timeline import (
    IdleCause,
    IdleInterval,
    UseChange,
    count_intervals,
    find_idle_intervals,
    measure_admission_delays,
    measure_first_waits,
    measure_pod_creations,
    measure_totals,
)
from benchmarks.table import compute_percentile

IDLE_LIMITS_SECONDS = (1.0, 2.0, 5.0)

Rows = list[tuple[str, str]]


def build_quota_rows(changes: Sequence[UseChange], *, quota: int) -> Rows:
    """Return the figures of the quota and of idle GPUs."""
    totals = measure_totals(changes)
    intervals = find_idle_intervals(changes, quota=quota)
    total_gpu_seconds = quota * totals.seconds
    delays = measure_admission_delays(changes, quota=quota)
    return [
        ("GPUs of the quota", str(quota)),
        ("most GPUs reserved", str(totals.max_reserved)),
        ("most GPUs of pods on nodes", str(totals.max_bound)),
        ("  without pods that were evicted before they started", str(totals.max_charged)),
        ("most GPUs of pods that were evicted before they started", str(totals.max_returned_early)),
        ("duration", f"{totals.seconds:.0f} s"),
        ("quota reserved", format_share(totals.reserved_gpu_seconds, total_gpu_seconds)),
        ("quota used by pods on nodes", format_share(totals.bound_gpu_seconds, total_gpu_seconds)),
        ("quota reserved without a pod on a node", format_share(totals.unbound_gpu_seconds, total_gpu_seconds)),
        ("quota idle while a job fits", format_share(sum(i.gpu_seconds for i in intervals), total_gpu_seconds)),
        *_build_idle_rows(intervals),
        ("from free quota to admission", describe_seconds(delays)),
        ("from job to all pods, operator", describe_seconds(measure_pod_creations(changes))),
    ]


def _build_idle_rows(intervals: Sequence[IdleInterval]) -> Rows:
    seconds_by_cause = sum((interval.seconds_by_cause for interval in intervals), Counter[IdleCause]())
    rows = [(f"  {cause}", f"{seconds_by_cause[cause]:.1f} s") for cause in IdleCause]
    for limit in IDLE_LIMITS_SECONDS:
        counts = count_intervals(intervals, longer_than=limit)
        causes = "; ".join(f"{count}: {cause}" for cause, count in counts.items())
        rows.append((f"idle for more than {limit:g} s while a job fits, times", f"{sum(counts.values())} {causes}"))
    longest = max((interval.seconds for interval in intervals), default=0.0)
    return [*rows, ("longest time idle while a job fits", f"{longest:.2f} s")]


def build_wait_rows(changes: Sequence[UseChange], plans: Mapping[str, QueuedJob]) -> Rows:
    """Return the time from the arrival to the first admission by priority."""
    waits: defaultdict[str, list[float]] = defaultdict(list)
    for job, seconds in measure_first_waits(changes).items():
        waits[plans[job].priority].append(seconds)
    return [(f"first admission, priority {name}", describe_seconds(waits[name])) for name in reversed(PRIORITIES)]


def format_share(part: float, total: float) -> str:
    """Return GPU-seconds and their share of the total."""
    return f"{part:.0f} GPU s, {100 * part / total:.1f} %" if total else "none"


def describe_seconds(seconds: Sequence[float]) -> str:
    """Return number, median, p99 and maximum."""
    if not seconds:
        return "none"
    p99 = compute_percentile(list(seconds), 99)
    return f"{len(seconds)}: p50 {statistics.median(seconds):.2f} s, p99 {p99:.2f} s, max {max(seconds):.2f} s"


def write_results(folder: Path, rows: Rows, *, problems: Sequence[str], changes: Sequence[UseChange]) -> None:
    """Write result.md, result.json, and timeline.jsonl with a line per change, into the folder."""
    lines = ["| figure | value |", "| --- | --- |", *(f"| {title.strip()} | {value} |" for title, value in rows)]
    wrong = [f"- WRONG: {problem}" for problem in problems]
    (folder / "result.md").write_text("\n".join([*lines, "", *wrong, f"{len(problems)} things wrong"]) + "\n")
    result = {"wrong": list(problems), "figures": {title.strip(): value for title, value in rows}}
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / "timeline.jsonl").write_text("".join(json.dumps(asdict(change)) + "\n" for change in changes))
