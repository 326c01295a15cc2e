"""Tests of the pending reason and the nodes of a derived status."""

import pytest

from finetune_api.v1alpha1.status import (
    AttemptState,
    JobStatus,
    WaitStatus,
)
from finetune_operator.core.derive_status import StatusContext, derive_status
from finetune_operator.observation.pods import Observation
from testing.builders.jobs import NOW, build_observation, job, pod, running_pod, terminating_pod
from testing.builders.statuses import (
    LATER,
    PULL,
    UNSCHEDULABLE,
    build_finished_status,
    build_status_with_attempts,
    derive_later_status,
)

JOB = job()


def test_pending_reason_keeps_its_start_and_gets_the_newest_message() -> None:
    before = build_status_with_attempts(AttemptState.STARTING).model_copy(
        update={"waiting": WaitStatus(reason="Unschedulable", message="2 of 2 pods", since=NOW)}
    )
    assert derive_later_status(before, pending_reason=UNSCHEDULABLE).waiting == WaitStatus(
        reason="Unschedulable", message=UNSCHEDULABLE.message, since=NOW
    )
    assert derive_later_status(before, pending_reason=PULL).waiting == WaitStatus(
        reason="ImagePullFailed", message="no such tag", since=LATER
    )
    assert derive_later_status(before).waiting is None


@pytest.mark.parametrize(
    "status",
    [build_status_with_attempts(AttemptState.RUNNING), build_finished_status(AttemptState.FAILED), JobStatus()],
)
def test_only_a_starting_attempt_has_a_pending_reason(status: JobStatus) -> None:
    assert derive_later_status(status, pending_reason=UNSCHEDULABLE).waiting is None


def test_the_status_lists_nodes_by_rank_without_deleted_pods() -> None:
    pending_pod = pod(JOB, 0, containerStatuses=[{"name": "trainer", "state": {"waiting": {"reason": "ErrImagePull"}}}])
    observation = build_observation(JOB, pending_pod, terminating_pod(running_pod(JOB, 1)))
    nodes = derive_status(
        job(status=build_status_with_attempts(AttemptState.RUNNING)), StatusContext(observation, None, NOW)
    ).nodes
    assert [(n.node_rank, n.pod_name, n.k8s_node, n.phase) for n in nodes] == [
        (0, "bert-0-0", "gpu-0", "ErrImagePull"),
        (1, "bert-0-1", "gpu-1", "Terminating"),
    ]
    with_tombstone = Observation(
        nodes=build_observation(JOB, running_pod(JOB, 0), tombstones=(running_pod(JOB, 1),)).nodes
    )
    nodes = derive_status(
        job(status=build_status_with_attempts(AttemptState.RUNNING)), StatusContext(with_tombstone, None, NOW)
    ).nodes
    assert [(n.node_rank, n.phase) for n in nodes] == [(0, "Running")]
