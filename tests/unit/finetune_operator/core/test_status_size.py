"""Test that the largest possible status stays below 1.5 MB, the object size limit of etcd."""

import json

from finetune_api.v1alpha1.job import MAX_NODES, FineTuneJob
from finetune_api.v1alpha1.status import AttemptState, JobStatus
from finetune_operator.controller.reconcile import render_status
from finetune_operator.failures.node_avoidance import MAX_KEPT_ATTEMPTS
from finetune_operator.observation.pods import Observation
from testing.builders.jobs import RawBody, build_observation, decide_once, finished_pod, job, running_pod

MAX_OBJECT_BYTES = 1_500_000
SPEC_AND_METADATA_BYTES = 200_000


def failed_pod(ftjob: FineTuneJob, node_rank: int, *, attempt: int) -> RawBody:
    """Return a failed pod with a message of maximum length; every node except node 700 is a victim."""
    error_text = "RuntimeError: " + "NCCL communicator was aborted. " * 40
    message = {
        "final": True,
        "outcome": "failed",
        "errorType": "DistBackendError",
        "rank": node_rank,
        "message": error_text,
    }
    message |= {"victim": True} if node_rank != 700 else {"errorType": "ValueError", "message": "bad"}
    message |= {"time": 1767268800.0 + node_rank % 7, "progress": {"step": 12345}}
    return finished_pod(
        ftjob, node_rank, attempt=attempt, finishedAt="2026-01-01T12:00:00Z", message=json.dumps(message)
    )


def measure_status_bytes(status: JobStatus) -> int:
    return len(json.dumps(render_status(status), separators=(",", ":")))


def test_status_of_the_largest_job_with_all_kept_attempts_fits_into_etcd() -> None:
    ftjob, _ = decide_once(job(numNodes=MAX_NODES, restartPolicy={"maxRestarts": 99}), Observation(is_fresh=True))
    ftjob, _ = decide_once(ftjob, build_observation(ftjob, *(running_pod(ftjob, rank) for rank in range(MAX_NODES))))
    all_failed = build_observation(ftjob, *(failed_pod(ftjob, rank, attempt=0) for rank in range(MAX_NODES)))
    ftjob, _ = decide_once(ftjob, all_failed)
    assert ftjob.status.attempts[-1].state is AttemptState.STOPPING
    stopping_bytes = measure_status_bytes(ftjob.status)

    ftjob, _ = decide_once(ftjob, all_failed)
    ended_attempt = ftjob.status.attempts[0]
    assert (ended_attempt.state, ended_attempt.node_rank, len(ended_attempt.evidence)) == (AttemptState.FAILED, 700, 8)
    assert 700 in [evidence.node_rank for evidence in ended_attempt.evidence]
    ended_attempt_bytes = len(ended_attempt.model_dump_json(by_alias=True, exclude_none=True))
    assert stopping_bytes + (MAX_KEPT_ATTEMPTS - 1) * ended_attempt_bytes + SPEC_AND_METADATA_BYTES < MAX_OBJECT_BYTES
