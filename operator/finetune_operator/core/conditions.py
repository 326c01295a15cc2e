"""Computes the conditions of a job and their messages from scratch in each pass."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import AttemptState, Condition, JobStatus
from finetune_operator.core.phase import is_complete, is_finished, is_suspended
from finetune_operator.observation.pods import Observation


@dataclass(frozen=True)
class ConditionBuilder:
    """Builds the conditions of one status write, which share the generation and the time."""

    generation: int
    now: datetime

    def build(self, condition_type: str, is_true: bool, reason: str, message: str = "") -> Condition:
        """Build a condition with status True or False."""
        return Condition(
            type=condition_type,
            status="True" if is_true else "False",
            observed_generation=self.generation,
            last_transition_time=self.now,
            reason=reason,
            message=message,
        )

    def build_failed(self, reason: str, message: str) -> tuple[Condition, ...]:
        """Build the conditions of a job that failed without a verdict on its attempt."""
        return (
            self.build("Running", False, reason, message),
            *(
                self.build(condition_type, True, reason, message)
                for condition_type in ("Failed", "Finished", "Stalled")
            ),
        )


def build_conditions(job: FineTuneJob, status: JobStatus, observation: Observation, now: datetime) -> list[Condition]:
    """Build the conditions of a job. Except Running and Suspended, only true conditions are present (kstatus)."""
    builder = ConditionBuilder(job.metadata.generation, now)
    reason, message = _describe_attempt_state(job, status, observation)
    is_running = bool(status.attempts) and status.attempts[-1].state is AttemptState.RUNNING and not is_finished(status)
    suspended = is_suspended(job, status)
    conditions = [
        builder.build("Running", is_running, reason, message),
        builder.build(
            "Suspended",
            suspended,
            Reason.SUSPENDED
            if suspended
            else (Reason.SUSPENDING if job.spec.suspend and not is_finished(status) else Reason.ACTIVE),
            message if suspended else "",
        ),
    ]
    if is_finished(status):
        end = "Complete" if is_complete(status) else "Failed"
        conditions += [builder.build(end, True, reason, message), builder.build("Finished", True, reason, message)]
        if end == "Failed":
            conditions.append(builder.build("Stalled", True, reason, message))
    elif not is_running and not suspended:
        conditions.append(builder.build("Reconciling", True, reason, message))
    return conditions


def _describe_attempt_state(job: FineTuneJob, status: JobStatus, observation: Observation) -> tuple[str, str]:
    """Return the reason and a one-line message for the state of the latest attempt."""
    if not status.attempts:
        if job.spec.suspend:
            return Reason.SUSPENDED, "not started; set spec.suspend to false to start"
        return Reason.QUEUED, ""
    record = status.attempts[-1]
    previous = status.attempts[-2] if len(status.attempts) > 1 else None
    match record.state:
        case AttemptState.SUCCEEDED | AttemptState.FAILED:
            return record.reason, record.message
        case AttemptState.STOPPED:
            return Reason.SUSPENDED, f"every pod is released{_describe_resume_point(job, status)}"
        case AttemptState.STOPPING:
            return Reason.STOPPING, f"attempt {record.attempt} is stopping: {record.reason}"
        case AttemptState.RUNNING:
            explanation = _explain_missing_progress(observation)
            return Reason.RUNNING, f"attempt {record.attempt} runs on {job.num_attempt_nodes} nodes{explanation}"
        case AttemptState.STARTING:
            if status.waiting is not None:
                return status.waiting.reason, status.waiting.message
            if previous is not None and previous.state is AttemptState.FAILED:
                delayed = f" after {record.not_before:%H:%M:%S}" if record.not_before else ""
                return Reason.RESTARTING, f"attempt {record.attempt} starts{delayed}; {previous.message}"
            return Reason.STARTING, f"attempt {record.attempt} is starting"


def _explain_missing_progress(observation: Observation) -> str:
    """Explain why progress is unavailable, so that the job does not appear to be stuck."""
    if not observation.unreachable_endpoint:
        return ""
    return (
        f"; progress unavailable: {observation.unreachable_endpoint} does not answer"
        " (docs/operations/security.md, network)"
    )


def _describe_resume_point(job: FineTuneJob, status: JobStatus) -> str:
    """Describe the checkpoint from which a suspended job resumes; empty for a command."""
    if job.spec.command is not None:
        return ""
    checkpoint = status.progress.last_checkpoint if status.progress else None
    return f"; it resumes from {checkpoint}" if checkpoint else "; no checkpoint was written yet"


def acknowledge_generation(status: JobStatus, generation: int) -> JobStatus:
    """Return the status of a finished job with the generation of its spec, which may still be edited.

    kubectl wait, kstatus, Flux and Argo wait until status and conditions contain the generation of the object.
    """
    if status.observed_generation == generation:
        return status
    conditions = tuple(c.model_copy(update={"observed_generation": generation}) for c in status.conditions)
    return status.model_copy(update={"observed_generation": generation, "conditions": conditions})


def keep_transition_times(
    desired_conditions: Iterable[Condition], previous_conditions: Iterable[Condition]
) -> tuple[Condition, ...]:
    """Return the desired conditions, keeping the transition time of those whose status is unchanged."""
    since = {(c.type, c.status): c.last_transition_time for c in previous_conditions}
    return tuple(
        c.model_copy(update={"last_transition_time": since.get((c.type, c.status), c.last_transition_time)})
        for c in desired_conditions
    )
