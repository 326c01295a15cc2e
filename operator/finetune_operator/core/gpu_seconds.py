"""Divides the time for which a job held GPUs into phases, from the times that its status records (decisions/132).

All functions are pure. The GPUs of an attempt count from the mean of the times at which its pods were assigned to
Kubernetes nodes until the attempt has ended, so that the GPU-seconds of all phases add up to this time multiplied by
the number of GPUs, whatever the recorded times are.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import pairwise

from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, Fault, GpuSeconds, JobStatus
from finetune_operator.core.job_context import JobContext


class GpuPhase(StrEnum):
    """What a job used its GPUs for."""

    STARTING = "starting"  # image pull, container start, loading and resuming, until the first step
    USEFUL = "useful"  # steps that count in the result, or still can
    UNREPORTED = "unreported"  # a command without progress reports ran, in an attempt that did not complete the job
    LOST = "lost"  # steps that were trained again, a failure until its detection, and all steps of a failed job
    STOPPING = "stopping"  # saving a checkpoint and ending the pods


GpuCategory = tuple[str, Fault | None]  # phase, fault that caused it
GpuTime = Mapping[GpuCategory, int]  # GPU-microseconds, whose sums are exact and never too large
MICROSECOND = timedelta(microseconds=1)
MICROSECONDS = 1_000_000  # per second


def account_gpu_time(status: JobStatus, now: datetime, *, is_command: bool) -> GpuTime:
    """Return the GPU time of all attempts by phase and fault; the current attempt counts until `now`.

    is_command: whether the job runs a command, which may report no steps.
    """
    total: dict[GpuCategory, int] = {}
    for entry in status.dropped_gpu_seconds:
        _add(total, (entry.phase, entry.fault), entry.seconds * MICROSECONDS)
    for record in status.attempts:
        for category, gpu_time in divide_attempt(record, now, is_command=is_command).items():
            _add(total, category, gpu_time)
    last_record = status.attempts[-1] if status.attempts else None
    if status.completion_time is not None and last_record and last_record.state is AttemptState.FAILED:
        # a failed job has no result in which its steps could count
        for phase in (GpuPhase.USEFUL, GpuPhase.UNREPORTED):
            _add(total, (GpuPhase.LOST, last_record.fault), total.pop((phase, None), 0))
    return total


def divide_attempt(record: AttemptRecord, now: datetime, *, is_command: bool) -> GpuTime:
    """Return the GPU time of one attempt by phase and fault; empty if it held no GPUs."""
    begin, end = record.allocated_time, record.end_time or now
    if begin is None or record.gpus is None:
        return {}
    trained_at = _find_training_start(record, is_command=is_command)
    stopped_at = record.stop_time or end
    last_step_at = record.last_step_time or stopped_at
    # a recorded time may be missing, forged, or from another clock; the limits keep the order and the sum
    limits = [begin]
    for time in (trained_at or stopped_at, last_step_at, stopped_at, end):
        limits.append(max(limits[-1], min(time, end)))
    starting, training, unfinished_step, stopping = (
        record.gpus * ((later - earlier) // MICROSECOND) for earlier, later in pairwise(limits)
    )
    total: dict[GpuCategory, int] = {}
    _add(total, (GpuPhase.STARTING, record.restart_fault), starting)
    _add(total, (GpuPhase.STOPPING, record.fault), stopping)
    has_failed = record.state is AttemptState.FAILED
    has_steps = record.first_step_time is not None or record.state is AttemptState.SUCCEEDED
    if not has_steps:
        _add(total, (GpuPhase.UNREPORTED, None), training + unfinished_step)
        return total
    lost = _estimate_lost_time(record, training)
    _add(total, (GpuPhase.USEFUL, None), training - lost)
    _add(total, (GpuPhase.LOST, record.fault), lost)
    _add(total, (GpuPhase.LOST, record.fault) if has_failed else (GpuPhase.USEFUL, None), unfinished_step)
    return total


def _find_training_start(record: AttemptRecord, *, is_command: bool) -> datetime | None:
    """Return when training began: with the first step or, without reported steps, when all nodes ran."""
    if record.first_step_time is None and (is_command or record.state is AttemptState.SUCCEEDED):
        return record.running_time
    return record.first_step_time


def _estimate_lost_time(record: AttemptRecord, training: int) -> int:
    """Return the share of the training time that corresponds to the repeated steps, which are known once it resumed."""
    steps = (record.last_step or 0) - (record.first_step or 0)
    if steps <= 0 or not record.steps_lost:
        return 0
    return training * min(record.steps_lost, steps) // steps


def _add(total: dict[GpuCategory, int], category: GpuCategory, gpu_time: int) -> None:
    if gpu_time:
        total[category] = total.get(category, 0) + gpu_time


def render_gpu_seconds(gpu_time: GpuTime) -> tuple[GpuSeconds, ...]:
    """Return the entries of the status, in full seconds."""
    ordered = sorted(gpu_time.items(), key=lambda item: (item[0][0], item[0][1] or ""))
    return tuple(
        GpuSeconds(phase=phase, fault=fault, seconds=round(time / MICROSECONDS)) for (phase, fault), time in ordered
    )


def update_gpu_seconds(previous: JobStatus, status: JobStatus, now: datetime, *, is_command: bool) -> JobStatus:
    """Return the status with the GPU-seconds until `now` if anything else changed, so that they cause no write."""
    unchanged = status.model_copy(update={"gpu_seconds": previous.gpu_seconds})
    if unchanged == previous:
        return unchanged
    gpu_seconds = render_gpu_seconds(account_gpu_time(status, now, is_command=is_command))
    return status.model_copy(update={"gpu_seconds": gpu_seconds})


def drop_attempts(
    status: JobStatus, kept: tuple[AttemptRecord, ...], now: datetime, *, is_command: bool
) -> tuple[GpuSeconds, ...]:
    """Return the GPU-seconds of the dropped attempts after only `kept` remain of the attempts in the status."""
    kept_numbers = {record.attempt for record in kept}
    dropped = tuple(record for record in status.attempts if record.attempt not in kept_numbers)
    remaining = status.model_copy(update={"attempts": dropped, "completion_time": None})
    return render_gpu_seconds(account_gpu_time(remaining, now, is_command=is_command))


def record_allocation(context: JobContext, status: JobStatus) -> JobStatus:
    """Return the new status with the GPUs of the observed pods that were assigned to Kubernetes nodes.

    Pods that are gone may be unknown after a restart of the operator, so the record changes only if there are more.
    """
    if not context.status.attempts:
        return status
    assigned_nodes = [node for node in context.nodes if node.is_scheduled]
    gpus, attempt = len(assigned_nodes) * context.job.spec.gpus_per_node, context.record.attempt
    if gpus <= (context.record.gpus or 0):
        return status
    times = (node.scheduled_at or node.started_at or context.now for node in assigned_nodes)
    earliest = context.record.start_time or context.now
    offsets = (max(timedelta(), min(time, context.now) - earliest) for time in times)
    update = {"gpus": gpus, "allocated_time": earliest + sum(offsets, timedelta()) / len(assigned_nodes)}
    attempts = (each.model_copy(update=update) if each.attempt == attempt else each for each in status.attempts)
    return status.model_copy(update={"attempts": tuple(attempts)})
