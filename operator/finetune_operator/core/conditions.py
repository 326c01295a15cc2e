"""What a status tells people and tools: conditions, phase, columns. Stated anew each time, never accumulated."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from finetune_api.batch import Batch
from finetune_api.oom_repair import apply_repair
from finetune_api.termination import Outcome
from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import (
    AttemptState,
    BatchStatus,
    Condition,
    Display,
    JobStatus,
    NodeStatus,
    Phase,
    Progress,
    WaitStatus,
)
from finetune_operator.core.pending import REFUSED, Wait
from finetune_operator.observation.pods import Life, NodeObservation, Observation
from finetune_operator.plan.run_plan import batch_of, chosen_batch


@dataclass(frozen=True)
class Told:
    """What the telling is made of besides the status itself."""

    seen: Observation
    wait: Wait | None
    now: datetime


def tell(job: FineTuneJob, told: Told) -> JobStatus:
    """The job's status with everything that is derived for its readers filled in."""
    status = job.status
    nodes = told.seen.of_attempt(status.attempt) if status.attempt is not None else ()
    progress = newest_progress(status, nodes, told.seen.progress)
    status = status.model_copy(
        update={
            "observed_generation": job.metadata.generation,
            "waiting": _waiting(status, told) if status.completion_time is None else None,
            "progress": progress,
            "batch": _batch(trained_batch(job, told.seen)),
            "output": _output(job),
            # of pods that are gone every replica remembers others, and they would correct each other without end
            "nodes": tuple(_node(node) for node in nodes if node.life is not Life.GONE),
        }
    )
    phase = _phase(job, status, nodes)
    wanted = _conditions(job, status, told)
    return status.model_copy(
        update={
            "phase": phase,
            "conditions": keep_transition_times(wanted, job.status.conditions),
            "display": _display(job, nodes, progress, phase),
        }
    )


def keep_transition_times(wanted: Iterable[Condition], before: Iterable[Condition]) -> tuple[Condition, ...]:
    """The wanted conditions; one whose status did not change keeps its transition time."""
    since = {(c.type, c.status): c.last_transition_time for c in before}
    return tuple(
        c.model_copy(update={"last_transition_time": since.get((c.type, c.status), c.last_transition_time)})
        for c in wanted
    )


def essence(status: JobStatus) -> JobStatus:
    """The status without what only readers miss when it comes a second late."""
    update: dict[str, object] = {"nodes": (), "display": None, "progress": None}
    if status.attempts:
        last = status.attempts[-1]
        ends = tuple(evidence for evidence in last.evidence if evidence.ended and evidence.outcome != Outcome.STOPPED)
        record = last.model_copy(
            update={"evidence": ends, "last_step": None, "first_step": None, "first_step_time": None}
        )
        update["attempts"] = (*status.attempts[:-1], record)
    return status.model_copy(update=update)


def finished(status: JobStatus) -> bool:
    """Complete or Failed for good."""
    return status.completion_time is not None


def suspended(job: FineTuneJob, status: JobStatus) -> bool:
    """Asked for, and no pod is left."""
    return (
        job.spec.suspend
        and not finished(status)
        and (not status.attempts or status.attempts[-1].state is AttemptState.STOPPED)
    )


def _conditions(job: FineTuneJob, status: JobStatus, told: Told) -> list[Condition]:
    """Running and Suspended always; the others only while true, as kstatus and `kubectl wait` expect."""
    generation = job.metadata.generation

    def condition(kind: str, holds: bool, reason: str, message: str = "") -> Condition:
        return Condition(
            type=kind,
            status="True" if holds else "False",
            observed_generation=generation,
            last_transition_time=told.now,
            reason=reason,
            message=message,
        )

    reason, message = _situation(job, status, told.seen)
    running = bool(status.attempts) and status.attempts[-1].state is AttemptState.RUNNING and not finished(status)
    is_suspended = suspended(job, status)
    conditions = [
        condition("Running", running, reason, message),
        condition(
            "Suspended",
            is_suspended,
            Reason.SUSPENDED
            if is_suspended
            else (Reason.SUSPENDING if job.spec.suspend and not finished(status) else Reason.ACTIVE),
            message if is_suspended else "",
        ),
    ]
    if finished(status):
        end = "Complete" if _complete(status) else "Failed"
        conditions += [condition(end, True, reason, message), condition("Finished", True, reason, message)]
        if end == "Failed":
            conditions.append(condition("Stalled", True, reason, message))
    elif not running and not is_suspended:
        conditions.append(condition("Reconciling", True, reason, message))
    return conditions


def _complete(status: JobStatus) -> bool:
    return bool(status.attempts) and status.attempts[-1].state is AttemptState.SUCCEEDED


def _situation(job: FineTuneJob, status: JobStatus, seen: Observation) -> tuple[str, str]:
    """Reason and one line on where the job stands."""
    if not status.attempts:
        if job.spec.suspend:
            return Reason.SUSPENDED, "not started; set spec.suspend to false to start"
        return Reason.QUEUED, ""
    record = status.attempts[-1]
    before = status.attempts[-2] if len(status.attempts) > 1 else None
    match record.state:
        case AttemptState.SUCCEEDED | AttemptState.FAILED:
            return record.reason, record.message
        case AttemptState.STOPPED:
            return Reason.SUSPENDED, f"every pod is released{_saved(job, status)}"
        case AttemptState.STOPPING:
            return Reason.STOPPING, f"attempt {record.attempt} is stopping: {record.reason}"
        case AttemptState.RUNNING:
            return Reason.RUNNING, f"attempt {record.attempt} runs on {job.spec.num_nodes} nodes{_unheard(seen)}"
        case AttemptState.STARTING:
            if status.waiting is not None:
                return status.waiting.reason, status.waiting.message
            if before is not None and before.state is AttemptState.FAILED:
                delayed = f" after {record.not_before:%H:%M:%S}" if record.not_before else ""
                return Reason.RESTARTING, f"attempt {record.attempt} starts{delayed}; {before.message}"
            return Reason.STARTING, f"attempt {record.attempt} is starting"


def _unheard(seen: Observation) -> str:
    """Why nobody sees how far it is, which otherwise looks like a job that stands still."""
    if not seen.unheard:
        return ""
    return (
        f"; how far it is nobody can see: the operator gets no answer from {seen.unheard}"
        " (docs/operations/security.md, network)"
    )


def _saved(job: FineTuneJob, status: JobStatus) -> str:
    """What a suspended job goes on from; what a command saved it alone knows."""
    if job.spec.command is not None:
        return ""
    checkpoint = status.progress.last_checkpoint if status.progress else None
    return f"; it resumes from {checkpoint}" if checkpoint else "; no checkpoint was written yet"


def _phase(job: FineTuneJob, status: JobStatus, nodes: tuple[NodeObservation, ...]) -> Phase:
    if finished(status):
        return Phase.COMPLETE if _complete(status) else Phase.FAILED
    if suspended(job, status):
        return Phase.SUSPENDED
    if not status.attempts:
        return Phase.QUEUED
    record = status.attempts[-1]
    if record.state is AttemptState.RUNNING:
        return Phase.RUNNING
    if record.state is AttemptState.STOPPING:
        return Phase.SUSPENDED if job.spec.suspend else Phase.RESTARTING
    if status.restarts and len(status.attempts) > 1 and status.attempts[-2].state is AttemptState.FAILED:
        return Phase.RESTARTING
    return Phase.STARTING if any(node.scheduled for node in nodes) else Phase.QUEUED


def _waiting(status: JobStatus, told: Told) -> WaitStatus | None:
    """Since when it is waited for the same, in its newest words."""
    wait, before = told.wait, status.waiting
    if not status.attempts or status.attempts[-1].state is not AttemptState.STARTING:
        return None
    if wait is None:  # what was refused is known only to who tried: an operator that has just begun is yet to
        untried = before is not None and before.reason in REFUSED and not status.attempts[-1].created
        return before if untried else None
    if before is not None and before.reason == wait.reason and before.since <= told.now:  # else a clock was wrong
        return before.model_copy(update={"message": wait.message})
    return WaitStatus(reason=wait.reason, message=wait.message, since=told.now)


def newest_progress(status: JobStatus, nodes: tuple[NodeObservation, ...], polled: Progress | None) -> Progress | None:
    """The newest of what was polled, what rank 0 said last, and what is known."""
    said = [n.termination.progress for n in nodes if n.node_rank == 0 and n.termination and n.termination.progress]
    reports = [report for report in (*said, polled) if report is not None]
    if not reports:
        return status.progress
    newest = max(reports, key=lambda report: (report.step, report.update_time is not None))
    before = status.progress
    if before is not None and newest.update_time and before.update_time and newest.update_time < before.update_time:
        return before
    if newest.last_checkpoint is None and before is not None:
        newest = newest.model_copy(update={"last_checkpoint": before.last_checkpoint})
    return newest


def trained_batch(job: FineTuneJob, seen: Observation) -> Batch | None:
    """What the spec and its repair say; of auto what the trainer said last. None as long as nobody knows."""
    spec = apply_repair(job.spec, job.status.repair)
    if spec.command is not None or not spec.training.chooses_batch:
        return batch_of(spec)
    attempt, before = job.status.attempt, job.status.batch
    nodes = seen.of_attempt(attempt) if attempt is not None else ()
    said = [node.termination.progress for node in nodes if node.termination and node.termination.progress]
    sizes = [report.per_device_train_batch_size for report in (*said, seen.progress) if report is not None]
    known = [*sizes, before.per_device_train_batch_size if before else None]
    return next((batch for size in known if (batch := chosen_batch(spec, size)) is not None), None)


def _batch(batch: Batch | None) -> BatchStatus | None:
    if batch is None:
        return None
    return BatchStatus(
        per_device_train_batch_size=batch.per_device,
        gradient_accumulation_steps=batch.accumulation,
        world_size=batch.world_size,
        effective=batch.effective,
    )


def _output(job: FineTuneJob) -> str | None:
    output = job.spec.output
    folder = f"{job.metadata.namespace}/{job.metadata.name}"
    if output is None:
        return None
    return f"{output.persistent_volume_claim.claim_name}:{output.sub_path or folder}"


def _node(node: NodeObservation) -> NodeStatus:
    phase = node.waiting.reason if node.waiting and node.life is Life.PENDING else node.life.value
    if node.deleting and not node.ended:
        phase = "Terminating"
    return NodeStatus(node_rank=node.node_rank, pod_name=node.pod_name, k8s_node=node.k8s_node, phase=phase)


def _display(job: FineTuneJob, nodes: tuple[NodeObservation, ...], progress: Progress | None, phase: Phase) -> Display:
    running = sum(node.life is Life.RUNNING and not node.deleting for node in nodes)
    columns = {"nodes": f"{running}/{job.spec.num_nodes}"}
    if progress is not None:
        if progress.total_steps:
            percent = 100 * progress.step // progress.total_steps
            done = f"{progress.step}/{progress.total_steps}"
            columns["progress"] = f"stopped early {done}" if progress.stopped_early else f"{percent}% {done}"
        if progress.loss is not None:
            columns["loss"] = f"{progress.loss:.3f}"
        if phase is Phase.RUNNING and progress.tokens_per_second is not None:
            columns["tokens_per_second"] = short_number(progress.tokens_per_second)
        if phase is Phase.RUNNING and progress.eta_seconds is not None:
            columns["eta"] = short_duration(progress.eta_seconds)
    return Display(**columns)


def short_number(number: float) -> str:
    """18432 -> 18.4k."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{suffix}"
    return f"{number:.0f}"


def short_duration(seconds: int) -> str:
    """1320 -> 22m, as kubectl writes ages."""
    if seconds < 120:
        return f"{seconds}s"
    if seconds < 7200:
        return f"{seconds // 60}m"
    return f"{seconds // 3600}h{seconds % 3600 // 60}m" if seconds < 172_800 else f"{seconds // 86400}d"
