"""Tests that the status of the largest job stays below 256 KiB in every state, with texts of any language."""

import json
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune_api.schema.status_schema import bound_status
from finetune_api.v1alpha1.job import MAX_NODES, FineTuneJob
from finetune_api.v1alpha1.status import AttemptState, JobStatus, Phase
from finetune_operator import names
from finetune_operator.controller.reconcile import render_status
from finetune_operator.core.attempt_record import with_next_attempt
from finetune_operator.core.job_context import JobContext
from finetune_operator.failures.node_avoidance import MAX_KEPT_ATTEMPTS
from finetune_operator.kube.api_client import encode_json
from finetune_operator.observation.pods import Observation
from testing.builders.jobs import (
    NOW,
    SETTINGS,
    RawBody,
    build_observation,
    decide_once,
    decide_with,
    finished_pod,
    job,
    pod,
    running_pod,
    terminating_pod,
)

MAX_STATUS_BYTES = 256 * 1024
TEXTS = {"long in UTF-8": "😀" * 1000, "long in JSON": "\x01<&" * 500}  # characters with the longest encodings
ROOT_CAUSE = 700


def move_to_node(body: RawBody, node_rank: int) -> RawBody:
    """Return a copy of a pod of node rank 0 for another node; planning a run of a thousand nodes takes long."""
    metadata = body["metadata"]
    labels = {**metadata["labels"], names.NODE_RANK: str(node_rank)}
    name, uid = (f"{metadata[field][:-1]}{node_rank}" for field in ("name", "uid"))
    # a Kubernetes node with a name of maximum length
    pod_spec = {**body["spec"], "nodeName": f"n{node_rank}".ljust(253, "x")}
    return {**body, "metadata": {**metadata, "labels": labels, "name": name, "uid": uid}, "spec": pod_spec}


def failed_pod(body: RawBody, node_rank: int, text: str) -> RawBody:
    """Return the failed pod of node rank 0 for another node; all except one node are victims."""
    message: RawBody = {"final": True, "outcome": "failed", "errorType": "DistBackendError", "rank": node_rank}
    message |= {
        "message": f"RuntimeError: {text}",
        "progress": {"step": 12345},
        "time": NOW.timestamp() + node_rank % 7,
    }
    message |= {"errorType": "StorageFault"} if node_rank == ROOT_CAUSE else {"victim": True}
    (container,) = body["status"]["containerStatuses"]
    state = {"terminated": {**container["state"]["terminated"], "message": json.dumps(message)}}
    status = {**body["status"], "containerStatuses": [{**container, "state": state}]}
    return {**move_to_node(body, node_rank), "status": status}


def measure_status_bytes(status: JobStatus) -> int:
    """Return the size of the status as JSON in UTF-8, in which the API server escapes < and &."""
    content = encode_json(render_status(bound_status(status)))
    return len(content) + 5 * sum(content.count(character) for character in (b"<", b">", b"&"))


def fail_attempt(ftjob: FineTuneJob, text: str, now: Any) -> tuple[FineTuneJob, int]:
    """Run the current attempt until it failed; return the job and the size of its largest status."""
    attempt = ftjob.status.attempts[-1].attempt
    first_running, first_failed = running_pod(ftjob, 0, attempt=attempt), finished_pod(ftjob, 0, attempt=attempt)
    running = build_observation(ftjob, *(move_to_node(first_running, rank) for rank in range(MAX_NODES)))
    failed = build_observation(ftjob, *(failed_pod(first_failed, rank, text) for rank in range(MAX_NODES)))
    sizes = []
    for observation in (running, failed, failed):
        ftjob, _ = decide_once(ftjob, observation, now=now)
        ftjob = ftjob.model_copy(update={"status": bound_status(ftjob.status)})
        sizes.append(measure_status_bytes(ftjob.status))
    return ftjob, max(sizes)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_status_of_the_largest_job_with_all_kept_attempts_is_below_256_kib(text: str) -> None:
    ftjob, _ = decide_once(
        job(name="j" * 52, numNodes=MAX_NODES, restartPolicy={"maxRestarts": 99, "maxInfrastructureRestarts": 99}),
        Observation(is_fresh=True),
    )
    ftjob, first_size = fail_attempt(ftjob, text, NOW)
    failed = ftjob.status.attempts[0]
    assert (failed.state, failed.node_rank, len(failed.evidence)) == (AttemptState.FAILED, ROOT_CAUSE, 8)
    # the other attempts end as the first one did, and each avoids one more Kubernetes node
    status, next_record = ftjob.status.model_copy(update={"attempts": (failed,)}), ftjob.status.attempts[1]
    for number in range(1, MAX_KEPT_ATTEMPTS):
        update = {"attempt": number, "avoids": tuple(f"n{rank}".ljust(253, "x") for rank in range(number))}
        context = JobContext(ftjob, Observation(), NOW, SETTINGS)
        status = with_next_attempt(context, status, next_record.model_copy(update=update))
        if number < MAX_KEPT_ATTEMPTS - 1:
            ended = failed.model_copy(update=update)
            status = status.model_copy(update={"attempts": (*status.attempts[:-1], ended)})
    ftjob, last_size = fail_attempt(ftjob.model_copy(update={"status": status}), text, NOW + timedelta(days=2))

    assert len(ftjob.status.attempts) == MAX_KEPT_ATTEMPTS
    assert ftjob.status.attempts[-2].node_rank == ROOT_CAUSE
    assert max(first_size, last_size) < MAX_STATUS_BYTES


def test_status_lists_at_most_64_nodes_and_those_that_do_not_run_first() -> None:
    ftjob, _ = decide_once(job(numNodes=100), Observation(is_fresh=True))
    pods = [running_pod(ftjob, rank) for rank in range(98)]
    pods += [pod(ftjob, 98), terminating_pod(running_pod(ftjob, 99))]
    ftjob, _ = decide_with(ftjob, *pods)

    assert [node.node_rank for node in ftjob.status.nodes] == [*range(62), 98, 99]
    assert ftjob.status.replicas == 100


@settings(max_examples=50, deadline=None)
@given(reason=st.text(max_size=5000), message=st.text(max_size=5000), phase=st.sampled_from(("Pending", "Failed")))
def test_hostile_pod_status_gives_a_bounded_status(reason: str, message: str, phase: str) -> None:
    ftjob, _ = decide_once(job(), Observation(is_fresh=True))
    waiting = {"name": "trainer", "state": {"waiting": {"reason": reason, "message": message * 9}}}
    pods = [
        pod(ftjob, rank, phase=phase, reason=reason, message=message * 9, containerStatuses=[waiting])
        for rank in (0, 1)
    ]
    for _ in range(3):
        ftjob, _ = decide_with(ftjob, *pods)
        bounded = bound_status(ftjob.status)
        ftjob = ftjob.model_copy(update={"status": JobStatus.model_validate(render_status(bounded))})
        assert ftjob.status == bounded

    assert isinstance(ftjob.status.phase, Phase)
    assert measure_status_bytes(ftjob.status) < MAX_STATUS_BYTES
