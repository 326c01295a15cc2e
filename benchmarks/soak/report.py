"""Figures and report of a soak test."""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.soak.disturbances import Effect
from benchmarks.soak.replicas import MemorySample, Replica
from benchmarks.soak.state import SUSPENSION, SoakState

WARM_UP_SECONDS = 30.0  # the caches of a new process fill
MIN_LIFETIME_SECONDS = 180.0  # of a process whose growth is measured
FLAT_GROWTH = 1.2  # permitted ratio of the medians of the last and the first third
FLAT_GROWTH_MIB = 10.0  # permitted in addition, for short tests

Rows = list[tuple[str, str]]


@dataclass(frozen=True)
class MemoryTrend:
    """Median memory in MiB in the first and last third of the test, and growth of single processes in MiB.

    growths: difference of the medians of the last and first third of the lifetime of each process of at least 3 min.
    """

    first_third: float
    last_third: float
    maximum: float
    growths: tuple[float, ...]

    @property
    def is_flat(self) -> bool:
        limit = FLAT_GROWTH * self.first_third + FLAT_GROWTH_MIB
        return self.last_third <= limit and all(
            growth <= (FLAT_GROWTH - 1) * self.first_third + FLAT_GROWTH_MIB for growth in self.growths
        )


def measure_memory(processes: Iterable[Sequence[MemorySample]]) -> MemoryTrend | None:
    """Compare the memory at the begin and the end of the test and of each process; None without samples."""
    lifetimes = [[sample for sample in samples if sample.age >= WARM_UP_SECONDS] for samples in processes]
    all_samples = sorted((sample for samples in lifetimes for sample in samples), key=lambda s: s.since_start_of_test)
    if len(all_samples) < 3:
        return None
    first, last = _compare_thirds(all_samples)
    long_lifetimes = [samples for samples in lifetimes if len(samples) >= 3 and samples[-1].age >= MIN_LIFETIME_SECONDS]
    thirds = [_compare_thirds(samples) for samples in long_lifetimes]
    growths = tuple(end - begin for begin, end in thirds)
    return MemoryTrend(first, last, max(sample.memory_mib for sample in all_samples), growths)


def _compare_thirds(samples: Sequence[MemorySample]) -> tuple[float, float]:
    begin, end = samples[0].since_start_of_test, samples[-1].since_start_of_test
    third = (end - begin) / 3
    first = [sample.memory_mib for sample in samples if sample.since_start_of_test <= begin + third]
    last = [sample.memory_mib for sample in samples if sample.since_start_of_test >= end - third]
    return statistics.median(first), statistics.median(last)


def measure_restarts(state: SoakState, effects: Iterable[Effect]) -> tuple[list[float], list[float]]:
    """Return the seconds from each failure until all pods of the next attempt ran, without and with a disturbance."""
    effects = list(effects)
    undisturbed: list[float] = []
    disturbed: list[float] = []
    for (uid, attempt), failed_at in state.failed_at.items():
        running_at = state.running_at.get((uid, attempt + 1))
        if running_at is None or SUSPENSION in state.causes[uid, attempt]:
            continue
        is_disturbed = any(e.started_at < running_at and failed_at < e.ended_at for e in effects)
        (disturbed if is_disturbed else undisturbed).append(running_at - failed_at)
    return undisturbed, disturbed


def describe_times(seconds: Sequence[float]) -> str:
    """Return number, median, p99 and maximum of the times."""
    if not seconds:
        return "none"
    ordered = sorted(seconds)
    p99 = ordered[len(ordered) * 99 // 100]
    return f"{len(ordered)}: p50 {statistics.median(ordered):.2f} s, p99 {p99:.2f} s, max {ordered[-1]:.2f} s"


def build_operator_rows(replicas: Sequence[Replica], memory: MemoryTrend | None, *, jobs: int) -> Rows:
    """Return the figures of the operator processes."""
    lags = sorted(lag for replica in replicas for lag in replica.loop_lags)
    requests = sum((replica.requests for replica in replicas), Counter[str]())
    rows = [
        ("operator processes", str(len(replicas))),
        ("CPU seconds of the operators per job", f"{sum(replica.cpu_seconds for replica in replicas) / jobs:.2f}"),
        ("API requests of both replicas per job", f"{requests.total() / jobs:.1f}"),
        ("event loop lag, worst minute of a process, apart from pauses", f"{lags[-1]:.2f} s" if lags else "none"),
    ]
    if memory is not None:
        growths = memory.growths or (0.0,)
        rows += [
            ("memory, median of the first third", f"{memory.first_third:.1f} MiB"),
            ("memory, median of the last third", f"{memory.last_third:.1f} MiB"),
            ("memory, maximum", f"{memory.maximum:.1f} MiB"),
            (
                f"growth within the lifetime of {len(memory.growths)} processes, median and maximum",
                f"{statistics.median(growths):.1f} MiB, {max(growths):.1f} MiB",
            ),
        ]
    return rows


def build_recovery_rows(effects: Sequence[Effect]) -> Rows:
    """Return the time until the operator worked again after a disturbance, over all disturbances."""
    until_pod = [effect.until_pod for effect in effects if effect.until_pod is not None]
    return [
        ("disturbances of the operator", str(len(effects))),
        ("both replicas ready after a disturbance", describe_times([effect.until_ready for effect in effects])),
        ("pod of a job that was created at the begin of a disturbance", describe_times(until_pod)),
    ]


def build_effect_rows(effects: Iterable[Effect]) -> list[tuple[str, str, str, str]]:
    """Return, for each kind of disturbance: number, time until both replicas were ready, time until a pod existed."""
    by_title: defaultdict[str, list[Effect]] = defaultdict(list)
    for effect in effects:
        by_title[effect.title].append(effect)
    rows = []
    for title, same in sorted(by_title.items()):
        ready = [effect.until_ready for effect in same]
        pods = [effect.until_pod for effect in same if effect.until_pod is not None]
        rows.append((title, str(len(same)), _format_median_and_max(ready), _format_median_and_max(pods)))
    return rows


def count_ends(state: SoakState) -> Counter[tuple[str, str]]:
    """Count the attempts that did not complete by causes and by the operator's reason."""
    return Counter(
        (" + ".join(sorted(state.causes[key])) or "no cause", record.get("reason", ""))
        for key, record in state.attempts.items()
        if record.get("action", "Complete") != "Complete"
    )


def render_markdown(rows: Rows, effects: Iterable[Effect], ends: Counter[tuple[str, str]]) -> str:
    """Render the figures as Markdown tables."""
    lines = ["| figure | value |", "| --- | --- |", *(f"| {title} | {value} |" for title, value in rows)]
    lines += ["", "| disturbance | times | until both are ready, s | until a new job has its pod, s |"]
    lines += ["| --- | --- | --- | --- |", *(f"| {' | '.join(row)} |" for row in build_effect_rows(effects))]
    lines += ["", "| cause of the end of an attempt | reason in the status | attempts |", "| --- | --- | --- |"]
    lines += [f"| {cause} | {reason} | {count} |" for (cause, reason), count in ends.most_common()]
    return "\n".join(lines) + "\n"


def write_report(folder: Path, markdown: str, *, rows: Rows, effects: Iterable[Effect], problems: list[str]) -> None:
    """Write result.md and result.json into the folder."""
    wrong = "".join(f"- WRONG: {problem}\n" for problem in problems)
    (folder / "result.md").write_text(f"{markdown}\n{wrong}{len(problems)} things wrong\n")
    result = {
        "wrong": problems,
        "figures": dict(rows),
        "disturbances": [
            {"title": e.title, "untilReadySeconds": e.until_ready, "untilPodSeconds": e.until_pod} for e in effects
        ],
    }
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")


def _format_median_and_max(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.1f} (at most {max(seconds):.1f})" if seconds else "none"
