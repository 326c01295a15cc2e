"""Derives the phase of a job: Queued, Starting, Running, Restarting, Suspended, Complete or Failed."""

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.status import AttemptState, JobStatus, Phase
from finetune_operator.observation.pods import NodeObservation


def is_finished(status: JobStatus) -> bool:
    """Return whether the job is Complete or Failed; both are final."""
    return status.completion_time is not None


def is_complete(status: JobStatus) -> bool:
    """Return whether the last attempt of the job succeeded."""
    return bool(status.attempts) and status.attempts[-1].state is AttemptState.SUCCEEDED


def is_suspended(job: FineTuneJob, status: JobStatus) -> bool:
    """Return whether spec.suspend is set and every pod has been deleted."""
    return (
        job.spec.suspend
        and not is_finished(status)
        and (not status.attempts or status.attempts[-1].state is AttemptState.STOPPED)
    )


def derive_phase(job: FineTuneJob, status: JobStatus, nodes: tuple[NodeObservation, ...]) -> Phase:
    """Return the phase of the job, derived from its attempts and pods."""
    if is_finished(status):
        return Phase.COMPLETE if is_complete(status) else Phase.FAILED
    if is_suspended(job, status):
        return Phase.SUSPENDED
    if not status.attempts:
        return Phase.QUEUED
    record = status.attempts[-1]
    if record.state is AttemptState.RUNNING:
        return Phase.RUNNING
    if record.state is AttemptState.STOPPING:
        if job.spec.suspend:
            return Phase.SUSPENDED
        return Phase.RUNNING if job.spec.cancel else Phase.RESTARTING
    if status.restarts and len(status.attempts) > 1 and status.attempts[-2].state is AttemptState.FAILED:
        return Phase.RESTARTING
    return Phase.STARTING if any(node.is_scheduled for node in nodes) else Phase.QUEUED
