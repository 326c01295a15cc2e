"""Builders of a running job and of pods whose termination stops its attempt."""

from typing import Any

from finetune_api.termination import Outcome, Termination
from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.status import AttemptState
from finetune_supervisor.failures.termination_message import encode_termination
from testing.builders.jobs import (
    NOW,
    RawBody,
    build_observation,
    decide_once,
    job,
    running_pod,
)

KILLED: RawBody = {"exit_code": 137, "finishedAt": "2026-01-01T12:00:00Z"}


def termination_message(**fields: Any) -> str:
    """Return the JSON of a supervisor's termination message."""
    message = Termination(**{"final": True, "outcome": Outcome.FAILED, "time": NOW.timestamp() + 0.4, **fields})
    return encode_termination(message).decode()


VICTIM: RawBody = {"message": termination_message(error_type="DistBackendError", message="Connection closed by peer")}


def build_disrupted_pod(pod_body: RawBody, reason: str) -> RawBody:
    """Return a copy of the pod with a DisruptionTarget condition."""
    conditions = [{"type": "DisruptionTarget", "status": "True", "reason": reason}]
    return {**pod_body, "status": {**pod_body["status"], "conditions": conditions}}


def build_running_job(**fields: Any) -> FineTuneJob:
    """Return a job whose attempt 0 is running."""
    ftjob = job(**fields)
    ftjob, _ = decide_once(ftjob, build_observation(ftjob))
    ftjob, _ = decide_once(
        ftjob, build_observation(ftjob, *(running_pod(ftjob, rank) for rank in range(ftjob.spec.num_nodes)))
    )
    assert ftjob.status.attempts[-1].state is AttemptState.RUNNING
    return ftjob
