"""Timeline of the quota: which jobs reserve, use and wait for GPUs, and for how long GPUs are idle.

A GPU of the quota is idle while a job fits if the free quota is at least the request of the smallest waiting job.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class WaitStage(StrEnum):
    """What a job without quota waits for."""

    PODS = "pods"  # the operator has to create them
    QUEUE = "queue"  # all pods exist, Kueue has to admit them


class IdleCause(StrEnum):
    """Why a job that fits into the free quota has none."""

    OPERATOR = "the operator creates the pods"
    KUEUE = "Kueue has not admitted the pods"
    EVICTION = "preempted pods terminate, and Kueue holds back other jobs"


@dataclass(frozen=True)
class GpuUse:
    """GPUs that a job requests, that it reserves of the quota, and that its unfinished pods occupy on nodes.

    returned_early: those of `bound` of which Kueue has returned the quota, because no pod of the evicted job had
    started; its pods terminate.
    """

    request: int
    reserved: int = 0
    bound: int = 0
    returned_early: int = 0
    waits_for: WaitStage | None = None
    is_evicted: bool = False  # its pods terminate; Kueue keeps its quota while one of them runs


@dataclass(frozen=True)
class UseChange:
    """From `at`, in seconds, the job uses GPUs in this way; None after it was deleted."""

    at: float
    job: str
    use: GpuUse | None


@dataclass
class IdleInterval:
    """An uninterrupted time in which at least one waiting job fitted into the free quota.

    gpu_seconds: time multiplied by the GPUs that waiting jobs could have used.
    """

    start: float
    end: float
    gpu_seconds: float = 0.0
    seconds_by_cause: Counter[IdleCause] = field(default_factory=Counter)

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def main_cause(self) -> IdleCause:
        return self.seconds_by_cause.most_common(1)[0][0]


@dataclass(frozen=True)
class QuotaTotals:
    """Largest numbers of GPUs at any time, and GPU-seconds between the first and the last change."""

    max_reserved: int
    max_bound: int
    max_charged: int  # of pods on nodes, without those of which Kueue has returned the quota early
    max_returned_early: int
    seconds: float
    reserved_gpu_seconds: float
    bound_gpu_seconds: float
    unbound_gpu_seconds: float  # reserved by jobs whose pods are not on a node


def iterate_states(changes: Sequence[UseChange]) -> Iterator[tuple[float, float, Mapping[str, GpuUse]]]:
    """Yield start, end and the use of each job between two changes; the mapping is valid until the next step."""
    uses: dict[str, GpuUse] = {}
    for change, following in zip(changes, [*changes[1:], *changes[-1:]], strict=True):
        if change.use is None:
            uses.pop(change.job, None)
        else:
            uses[change.job] = change.use
        yield change.at, following.at, uses


def measure_totals(changes: Sequence[UseChange]) -> QuotaTotals:
    """Return the totals of the whole timeline."""
    max_reserved = max_bound = max_charged = max_returned_early = 0
    reserved_sum = bound_sum = unbound_sum = 0.0
    for start, end, uses in iterate_states(changes):
        reserved = sum(use.reserved for use in uses.values())
        bound = sum(use.bound for use in uses.values())
        returned_early = sum(use.returned_early for use in uses.values())
        max_reserved, max_bound = max(max_reserved, reserved), max(max_bound, bound)
        max_charged = max(max_charged, bound - returned_early)
        max_returned_early = max(max_returned_early, returned_early)
        reserved_sum += (end - start) * reserved
        bound_sum += (end - start) * bound
        unbound_sum += (end - start) * sum(max(0, use.reserved - use.bound) for use in uses.values())
    seconds = changes[-1].at - changes[0].at if changes else 0.0
    return QuotaTotals(
        max_reserved, max_bound, max_charged, max_returned_early, seconds, reserved_sum, bound_sum, unbound_sum
    )


def find_idle_intervals(changes: Sequence[UseChange], *, quota: int) -> list[IdleInterval]:
    """Return the times in which GPUs of the quota were idle while a job fitted."""
    intervals: list[IdleInterval] = []
    is_open = False
    for start, end, uses in iterate_states(changes):
        free = quota - sum(use.reserved for use in uses.values())
        fitting = [use for use in uses.values() if use.waits_for is not None and use.request <= free]
        if not fitting:
            is_open = False
            continue
        if not is_open:
            intervals.append(IdleInterval(start, start))
            is_open = True
        interval = intervals[-1]
        interval.end = end
        interval.gpu_seconds += (end - start) * _fill(free, fitting)
        interval.seconds_by_cause[_find_cause(fitting, uses)] += end - start  # type: ignore[assignment]
    return [interval for interval in intervals if interval.seconds > 0]


def _fill(free: int, fitting: Sequence[GpuUse]) -> int:
    """Return the GPUs that the jobs use if they are admitted one after the other, the largest first."""
    remaining = free
    for request in sorted((use.request for use in fitting), reverse=True):
        remaining -= request if request <= remaining else 0
    return free - remaining


def _find_cause(fitting: Sequence[GpuUse], uses: Mapping[str, GpuUse]) -> IdleCause:
    if any(use.is_evicted and use.reserved for use in uses.values()):
        return IdleCause.EVICTION
    is_queued = any(use.waits_for is WaitStage.QUEUE for use in fitting)
    return IdleCause.KUEUE if is_queued else IdleCause.OPERATOR


def measure_admission_delays(changes: Sequence[UseChange], *, quota: int) -> list[float]:
    """Return, for each admission, the seconds for which the job had fitted into the free quota without interruption."""
    fits_since: dict[str, float] = {}
    delays: list[float] = []
    for start, _, uses in iterate_states(changes):
        free = quota - sum(use.reserved for use in uses.values())
        for job in list(fits_since):
            use = uses.get(job)
            if use is not None and use.reserved:
                delays.append(start - fits_since.pop(job))
            elif use is None or use.waits_for is None or use.request > free:
                del fits_since[job]
        for job, use in uses.items():
            if use.waits_for is not None and use.request <= free:
                fits_since.setdefault(job, start)
    return delays


def measure_pod_creations(changes: Sequence[UseChange]) -> list[float]:
    """Return, for each attempt without quota, the seconds until all its pods exist or are admitted."""
    missing_since: dict[str, float] = {}
    durations: list[float] = []
    for change in changes:
        use = change.use
        if use is not None and use.waits_for is WaitStage.PODS:
            missing_since.setdefault(change.job, change.at)
            continue
        started_at = missing_since.pop(change.job, None)
        if started_at is not None and use is not None and (use.waits_for is WaitStage.QUEUE or use.reserved):
            durations.append(change.at - started_at)
    return durations


def measure_first_waits(changes: Sequence[UseChange]) -> dict[str, float]:
    """Return the seconds from the arrival of each job until its first admission."""
    arrived_at: dict[str, float] = {}
    waits: dict[str, float] = {}
    for change in changes:
        arrived_at.setdefault(change.job, change.at)
        if change.use is not None and change.use.reserved:
            waits.setdefault(change.job, change.at - arrived_at[change.job])
    return waits


def count_intervals(intervals: Sequence[IdleInterval], *, longer_than: float) -> dict[IdleCause, int]:
    """Count the intervals that last longer than a number of seconds by their main cause."""
    counts: defaultdict[IdleCause, int] = defaultdict(int)
    for interval in intervals:
        if interval.seconds > longer_than:
            counts[interval.main_cause] += 1
    return dict(counts)
