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
    terminating_pod,
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


def build_pod_evicted_by_kueue(pod_body: RawBody, *, preemptor: str = "UNKNOWN") -> RawBody:
    """Return a terminating copy of the pod with the condition that Kueue sets before it deletes a pod."""
    message = (
        f"Preempted to accommodate a workload (UID: {preemptor}, JobUID: UNKNOWN) due to prioritization in the"
        " ClusterQueue"
    )
    condition = {"type": "TerminationTarget", "status": "True", "reason": "WorkloadEvictedDueToPreempted"}
    conditions = [{**condition, "message": message}]
    return terminating_pod({**pod_body, "status": {**pod_body["status"], "conditions": conditions}})


def build_pod_deleted_before_its_start(pod_body: RawBody, **terminated_fields: Any) -> RawBody:
    """Return the last state of a pod that was deleted before its kubelet had started the container."""
    unknown: RawBody = {
        "exitCode": 137,
        "reason": "ContainerStatusUnknown",
        "message": "The container could not be located when the pod was terminated",
        **terminated_fields,
    }
    container = {
        "name": "trainer",
        "ready": False,
        "restartCount": 0,
        "started": False,
        "state": {"terminated": unknown},
    }
    status = {**pod_body["status"], "phase": "Failed", "containerStatuses": [container]}
    return terminating_pod({**pod_body, "status": status})


def build_running_job(**fields: Any) -> FineTuneJob:
    """Return a job whose attempt 0 is running."""
    ftjob = job(**fields)
    ftjob, _ = decide_once(ftjob, build_observation(ftjob))
    ftjob, _ = decide_once(
        ftjob, build_observation(ftjob, *(running_pod(ftjob, rank) for rank in range(ftjob.spec.num_nodes)))
    )
    assert ftjob.status.attempts[-1].state is AttemptState.RUNNING
    return ftjob
