"""Formats jobs as text: phase, progress, attempts, nodes and conditions."""

from collections.abc import Iterator, Sequence
from datetime import datetime

from finetune_api.v1alpha1.status import AttemptRecord, JobStatus
from finetune_cli.table import format_table
from finetune_client.job import Job
from finetune_operator.core.gpu_seconds import MICROSECONDS, account_gpu_time
from finetune_operator.core.printer_columns import format_duration

COLUMNS = ("NAME", "PHASE", "NODES", "PROGRESS", "LOSS", "TOKENS/S", "ETA", "RESTARTS", "AGE")


def format_job(job: Job, *, now: datetime) -> str:
    """Return a multi-line description of the job, most important attributes first."""
    status = job.status
    attributes = {name: text for name, text in _list_job_attributes(job, now) if text}
    width = max(len(name) for name in attributes)
    lines = [f"{name:<{width}}  {text}" for name, text in attributes.items()]
    if status.attempts:
        lines += ["", "Attempts", *(f"  {line}" for record in status.attempts for line in _format_attempt(record, now))]
    if status.degraded:
        lines += ["", "Degraded", *(f"  {each.reason}: {each.message}" for each in status.degraded)]
    if status.nodes:
        lines += ["", "Nodes"]
        lines += [
            f"  {node.node_rank}  {node.phase:<12} {node.pod_name}  {node.k8s_node}".rstrip() for node in status.nodes
        ]
    if status.conditions:
        lines += ["", "Conditions"]
        lines += [
            f"  {c.type:<12} {c.status:<6} {_format_age(c.last_transition_time, now):>5}  {c.reason}"
            for c in status.conditions
        ]
    return "\n".join(lines)


def format_job_table(jobs: Sequence[Job], *, now: datetime, show_namespace: bool = False) -> str:
    """Return a table of jobs with the columns of `kubectl get ftj`."""
    rows = [COLUMNS, *(_build_row(job, now) for job in jobs)]
    if show_namespace:
        rows = [(first, *row) for first, row in zip(("NAMESPACE", *(job.namespace for job in jobs)), rows, strict=True)]
    return format_table(rows)


def _build_row(job: Job, now: datetime) -> tuple[str, ...]:
    status, display = job.status, job.status.display
    cells = ("",) * 5
    if display:
        cells = (display.nodes, display.progress, display.loss, display.tokens_per_second, display.eta)
    return (
        job.metadata.name,
        status.phase or "",
        *cells,
        str(status.restarts),
        _format_age(job.metadata.creation_timestamp, now),
    )


def _list_job_attributes(job: Job, now: datetime) -> Iterator[tuple[str, str]]:
    status = job.status
    yield (
        "Job",
        f"{job.metadata.namespace}/{job.metadata.name}, {_format_age(job.metadata.creation_timestamp, now)} old",
    )
    yield "Phase", _format_phase(status)
    yield "Progress", _format_progress(status)
    if status.waiting:
        yield (
            "Waiting",
            f"{_format_age(status.waiting.since, now)} for {status.waiting.reason}: {status.waiting.message}",
        )
    if batch := status.batch:
        factors = (batch.per_device_train_batch_size, batch.gradient_accumulation_steps, batch.world_size)
        yield "Batch", f"{' x '.join(map(str, factors))} = {batch.effective} (per device x accumulation x ranks)"
    yield "Network", str(status.progress.network) if status.progress and status.progress.network else ""
    yield "GPU time", _format_gpu_time(job, now)
    yield "Restarts", str(status.restarts) if status.restarts else ""
    yield "Output", status.output or ""


def _format_phase(status: JobStatus) -> str:
    """Return the phase, with the message of the condition that explains it."""
    condition = next(
        (c for type_name in ("Complete", "Failed") for c in status.conditions if c.type == type_name), None
    )
    if condition is None:
        condition = next(
            (c for c in status.conditions if c.type in ("Suspended", "Reconciling") and c.status == "True"), None
        )
    phase = str(status.phase or "not processed by the operator yet")
    return f"{phase}: {condition.message}" if condition and condition.message else phase


def _format_progress(status: JobStatus) -> str:
    progress, display = status.progress, status.display
    if progress is None:
        return ""
    parts = [display.progress if display and display.progress else f"step {progress.step}"]
    for name, value, suffix in (
        ("loss", progress.loss, ""),
        ("eval loss", progress.eval_loss, ""),
        ("best", progress.best_metric, f" at step {progress.best_step}"),
        ("learning rate", progress.learning_rate, ""),
    ):
        parts += [f"{name} {value:.4g}{suffix}"] if value is not None else []
    if display and display.tokens_per_second:
        parts.append(f"{display.tokens_per_second} tokens/s")
    if display and display.eta:
        parts.append(f"ETA {display.eta}")
    if progress.last_checkpoint:
        parts.append(f"last checkpoint {progress.last_checkpoint}")
    return ", ".join(parts)


def _format_gpu_time(job: Job, now: datetime) -> str:
    """Return the GPU hours of the job and the share of each phase, with the faults that caused it."""
    is_command = (job.body.get("spec") or {}).get("command") is not None
    gpu_time = account_gpu_time(job.status, now, is_command=is_command)
    total = sum(gpu_time.values())
    if not total:
        return ""
    shares = sorted(gpu_time.items(), key=lambda item: item[1], reverse=True)
    parts = (f"{time / total:.0%} {phase}{f' ({fault})' if fault else ''}" for (phase, fault), time in shares)
    return f"{total / MICROSECONDS / 3600:.1f} GPU hours: {', '.join(parts)}"


def _format_attempt(record: AttemptRecord, now: datetime) -> Iterator[str]:
    duration = ""
    if record.start_time:
        duration = format_duration(int(((record.end_time or now) - record.start_time).total_seconds()))
    steps = f"steps {record.first_step or 0} to {record.last_step}" if record.last_step is not None else ""
    fault = f"fault: {record.fault}" if record.fault else ""
    yield "  ".join(
        part for part in (str(record.attempt), str(record.state), duration, steps, record.reason, fault) if part
    )
    if record.message:
        yield f"   {record.message}"
    if record.downtime_seconds is not None:
        repeated = f", {record.steps_lost} steps repeated" if record.steps_lost is not None else ""
        yield f"   trained again after {format_duration(record.downtime_seconds)}{repeated}"


def _format_age(time: datetime | None, now: datetime) -> str:
    return format_duration(max(0, int((now - time).total_seconds()))) if time else "?"
