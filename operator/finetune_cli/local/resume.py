"""Resumes a local run: finds changes to the job file that prevent it, and prepares the status."""

from datetime import datetime

from finetune_api.schema.cel_rules import MUTABLE, MUTABLE_WHILE_SUSPENDED
from finetune_api.v1alpha1.job import FineTuneJob, FineTuneJobSpec
from finetune_api.v1alpha1.status import AttemptState, JobStatus, RestartCounts
from finetune_cli.job_file import JobFile
from finetune_operator.observation.ownership import RawBody

MUTABLE_BETWEEN_RUNS = frozenset((*MUTABLE, *MUTABLE_WHILE_SUSPENDED))  # between runs a job counts as suspended


def find_changed_fields(stored_body: RawBody, file: JobFile) -> tuple[str, ...]:
    """Return the changed fields that prevent the job file from resuming the stored job."""
    old, new = FineTuneJob.parse(stored_body), file.job
    identity_fields = ("name", "namespace")
    identity = [
        f"metadata.{name}" for name in identity_fields if getattr(old.metadata, name) != getattr(new.metadata, name)
    ]
    fields = ((field.alias or name, name) for name, field in FineTuneJobSpec.model_fields.items())
    changed = [
        f"spec.{alias}"
        for alias, name in fields
        if alias not in MUTABLE_BETWEEN_RUNS and getattr(old.spec, name) != getattr(new.spec, name)
    ]
    return (*identity, *changed)


def prepare_resume(status: JobStatus, *, now: datetime) -> JobStatus:
    """Return the status for resuming the job: an unsuccessful attempt becomes Stopped, a complete job is unchanged."""
    if not status.attempts or status.attempts[-1].state is AttemptState.SUCCEEDED:
        return status
    failed = status.completion_time is not None
    record = status.attempts[-1].model_copy(update={"state": AttemptState.STOPPED})
    update = {
        "attempts": (*status.attempts[:-1], record),
        "completion_time": None,
        "without_progress": RestartCounts() if failed else status.without_progress,
        "start_time": now if failed else status.start_time,
    }
    return status.model_copy(update=update)
