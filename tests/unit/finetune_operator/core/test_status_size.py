"""An object of the API server may have 1.5 MB: the status of the largest job, after its longest life, stays below."""

import json

from finetune_api.v1alpha1.job import MAX_NODES, FineTuneJob
from finetune_api.v1alpha1.status import AttemptState, JobStatus
from finetune_operator.controller.reconcile import render_status
from finetune_operator.failures.node_avoidance import KEPT_ATTEMPTS
from finetune_operator.observation.pods import Observation
from testing.builders.jobs import Raw, ended, job, running, seen, step

MOST_BYTES = 1_500_000
SPEC_AND_METADATA = 200_000


def failed(of: FineTuneJob, node_rank: int, *, attempt: int) -> Raw:
    """Node 700 fails, and all others as its victims, with as many words as are kept."""
    words = "RuntimeError: " + "NCCL communicator was aborted. " * 40
    said = {"final": True, "outcome": "failed", "errorType": "DistBackendError", "rank": node_rank, "message": words}
    said |= {"victim": True} if node_rank != 700 else {"errorType": "ValueError", "message": "bad"}
    said |= {"time": 1767268800.0 + node_rank % 7, "progress": {"step": 12345}}
    return ended(of, node_rank, attempt=attempt, finishedAt="2026-01-01T12:00:00Z", message=json.dumps(said))


def size(status: JobStatus) -> int:
    return len(json.dumps(render_status(status), separators=(",", ":")))


def test_the_status_of_the_largest_job_fits_after_its_longest_life() -> None:
    of, _ = step(job(numNodes=MAX_NODES, restartPolicy={"maxRestarts": 99}), Observation(fresh=True))
    of, _ = step(of, seen(of, *(running(of, rank) for rank in range(MAX_NODES))))
    everything = seen(of, *(failed(of, rank, attempt=0) for rank in range(MAX_NODES)))
    of, _ = step(of, everything)
    assert of.status.attempts[-1].state is AttemptState.STOPPING
    stopping = size(of.status)

    of, _ = step(of, everything)
    over = of.status.attempts[0]
    assert (over.state, over.node_rank, len(over.evidence)) == (AttemptState.FAILED, 700, 8)
    assert 700 in [evidence.node_rank for evidence in over.evidence]
    earlier = len(over.model_dump_json(by_alias=True, exclude_none=True))
    assert stopping + (KEPT_ATTEMPTS - 1) * earlier + SPEC_AND_METADATA < MOST_BYTES
