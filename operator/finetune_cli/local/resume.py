"""Prepares the resumption of a local run, or lists the changed fields that prevent it."""

from datetime import datetime

from finetune_api.schema.cel_rules import MUTABLE, MUTABLE_WHILE_SUSPENDED
from finetune_api.v1alpha1.job import FineTuneJob, FineTuneJobSpec
from finetune_api.v1alpha1.status import AttemptState, JobStatus, RestartCounts
from finetune_cli.job_file import JobFile
from finetune_operator.observation.ownership import RawBody

MUTABLE_BETWEEN_RUNS = frozenset((*MUTABLE, *MUTABLE_WHILE_SUSPENDED))  # a job is considered suspended between two runs


def find_changed_fields(stored_body: RawBody, job_file: JobFile) -> tuple[str, ...]:
    """Return the changed fields of the job file that prevent the stored job from being resumed."""
    old_job, new_job = FineTuneJob.parse(stored_body), job_file.job
    identity_fields = ("name", "namespace")
    changed_identity_fields = [
        f"metadata.{name}"
        for name in identity_fields
        if getattr(old_job.metadata, name) != getattr(new_job.metadata, name)
    ]
    fields = ((field.alias or name, name) for name, field in FineTuneJobSpec.model_fields.items())
    changed_spec_fields = [
        f"spec.{alias}"
        for alias, name in fields
        if alias not in MUTABLE_BETWEEN_RUNS and getattr(old_job.spec, name) != getattr(new_job.spec, name)
    ]
    return (*changed_identity_fields, *changed_spec_fields)


def prepare_resume(status: JobStatus, *, now: datetime) -> JobStatus:
    """Return the status for resuming the job. An unsuccessful attempt becomes Stopped; a complete job is unchanged."""
    if not status.attempts or status.attempts[-1].state is AttemptState.SUCCEEDED:
        return status
    has_failed = status.completion_time is not None
    record = status.attempts[-1].model_copy(update={"state": AttemptState.STOPPED})
    update = {
        "attempts": (*status.attempts[:-1], record),
        "completion_time": None,
        "without_progress": RestartCounts() if has_failed else status.without_progress,
        "start_time": now if has_failed else status.start_time,
    }
    return status.model_copy(update=update)
