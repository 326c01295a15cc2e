"""Tests of parsing raw pods into observations."""

from datetime import timedelta
from typing import Any

import pytest

from finetune_operator import names
from finetune_operator.failures.rules import judge_node
from finetune_operator.observation.pods import (
    FENCED_AFTER_SECONDS,
    OVERDUE_SECONDS,
    NodeObservation,
    Observation,
    PodPhase,
    WaitingState,
    observe_pod,
    observe_pods,
)
from testing.builders.jobs import NOW, RawBody, finished_pod, job, pod, running_pod, terminating_pod

JOB = job()
INITIALIZING = {"waiting": {"reason": "PodInitializing"}}


def observe_single_pod(body: RawBody, *, is_tombstone: bool = False) -> NodeObservation:
    node = observe_pod(body, is_tombstone=is_tombstone)
    assert node is not None
    return node


def pod_with_container_state(state: RawBody, **status_fields: Any) -> RawBody:
    """Return the pod of node 0 with its trainer container in this state."""
    return pod(JOB, 0, containerStatuses=[{"name": names.CONTAINER, "state": state}], **status_fields)


def pod_with_waiting_container(reason: str, **fields: str) -> RawBody:
    return pod_with_container_state({"waiting": {"reason": reason, **fields}})


def build_condition(condition_type: str, status: str, **fields: str) -> RawBody:
    return {"type": condition_type, "status": status, **fields}


@pytest.mark.parametrize(
    ("body", "phase"),
    [
        pytest.param(pod(JOB, 0), PodPhase.PENDING, id="created"),
        pytest.param(pod_with_waiting_container("ContainerCreating"), PodPhase.PENDING, id="container creating"),
        pytest.param(
            pod_with_container_state({}, phase="Running"), PodPhase.PENDING, id="phase without a running container"
        ),
        pytest.param(running_pod(JOB, 0), PodPhase.RUNNING, id="running"),
        pytest.param(pod_with_container_state({"running": {}}), PodPhase.RUNNING, id="running before the phase"),
        pytest.param(
            pod_with_container_state({"terminated": {"exitCode": 0}}, phase="Running"),
            PodPhase.SUCCEEDED,
            id="exit code 0 before the phase",
        ),
        pytest.param(
            pod_with_container_state({"terminated": {"exitCode": 1}}, phase="Running"),
            PodPhase.FAILED,
            id="exit code 1 before the phase",
        ),
        pytest.param(
            pod_with_container_state({"terminated": {"exitCode": 0}}, phase="Failed"),
            PodPhase.SUCCEEDED,
            id="exit code 0 with a failed sidecar",
        ),
        pytest.param(
            pod_with_container_state({"terminated": {}}), PodPhase.FAILED, id="terminated without an exit code"
        ),
        pytest.param(pod(JOB, 0, phase="Failed", reason="Evicted"), PodPhase.FAILED, id="evicted before its start"),
        pytest.param(pod(JOB, 0, phase="Succeeded"), PodPhase.SUCCEEDED, id="phase without a container status"),
        pytest.param(pod(JOB, 0, phase="Unknown"), PodPhase.PENDING, id="unknown phase"),
    ],
)
def test_container_state_takes_precedence_over_pod_phase(body: RawBody, phase: PodPhase) -> None:
    assert observe_single_pod(body).phase is phase


def test_a_tombstone_has_no_running_process() -> None:
    live, tombstone = (
        observe_single_pod(running_pod(JOB, 0)),
        observe_single_pod(running_pod(JOB, 0), is_tombstone=True),
    )
    assert (live.has_ended, live.may_run(NOW), live.evidence.ended) == (False, True, False)
    assert (tombstone.has_ended, tombstone.may_run(NOW), tombstone.evidence.ended) == (True, False, True)


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        pytest.param(
            [build_condition("PodScheduled", "False", reason="Unschedulable", message="0/3 nodes")],
            WaitingState("Unschedulable", "0/3 nodes"),
            id="unschedulable",
        ),
        pytest.param(
            [build_condition("PodScheduled", "False", reason="SchedulingGated")],
            WaitingState("SchedulingGated", ""),
            id="gated",
        ),
        pytest.param(
            [build_condition("PodScheduled", "False")], WaitingState("Unschedulable", ""), id="without a reason"
        ),
        pytest.param([build_condition("PodScheduled", "True")], None, id="scheduled"),
        pytest.param([build_condition("Ready", "False", reason="ContainersNotReady")], None, id="not ready"),
    ],
)
def test_waiting_state_of_an_unscheduled_pod_is_read_from_its_condition(
    conditions: list[RawBody], expected: WaitingState | None
) -> None:
    assert observe_single_pod(pod(JOB, 0, conditions=conditions)).waiting == expected


def test_container_creation_time_is_the_later_of_the_scheduled_and_ready_to_start_times() -> None:
    since = {"lastTransitionTime": "2026-01-01T12:00:00Z"}
    assert (
        observe_single_pod(
            pod(JOB, 0, conditions=[{**build_condition("PodScheduled", "False"), **since}])
        ).container_creating_since
        is None
    )
    assert (
        observe_single_pod(pod(JOB, 0, conditions=[build_condition("PodScheduled", "True")])).container_creating_since
        is None
    )
    scheduled = {**build_condition("PodScheduled", "True"), **since}
    assert observe_single_pod(pod(JOB, 0, conditions=[scheduled])).container_creating_since == NOW
    for ready, creating_since in (("False", NOW), ("True", NOW + timedelta(minutes=1))):
        ready_condition = {
            **build_condition("PodReadyToStartContainers", ready),
            "lastTransitionTime": "2026-01-01T12:01:00Z",
        }
        assert (
            observe_single_pod(pod(JOB, 0, conditions=[scheduled, ready_condition])).container_creating_since
            == creating_since
        )


@pytest.mark.parametrize("edit", [{}, {names.ATTEMPT: "7"}, {names.NODE_RANK: "first"}, {names.MANAGED_BY: ""}])
def test_attempt_and_rank_are_parsed_from_the_pod_name(edit: dict[str, str]) -> None:
    body = pod(JOB, 1, attempt=3)
    edited = {**body, "metadata": {**body["metadata"], "labels": {**body["metadata"]["labels"], **edit}}}
    node = observe_single_pod(edited)
    assert (node.attempt, node.node_rank, node.is_relabelled) == (3, 1, False)


@pytest.mark.parametrize("labels", [None, {}, {names.ATTEMPT: "0"}, {names.JOB_UID: "another"}])
def test_live_pod_without_the_job_label_counts_as_relabelled(labels: dict[str, str] | None) -> None:
    body = pod(JOB, 0)
    edited = {**body, "metadata": {**body["metadata"], "labels": labels}}
    assert observe_single_pod(edited).is_relabelled
    assert not observe_single_pod(edited, is_tombstone=True).is_relabelled


@pytest.mark.parametrize("name", ["bert", "bert-0", "bert-0-1-2", "bert-0-1000", "bert-x-0", "bert--1-0", "other-0-0"])
def test_pod_whose_name_is_not_a_node_name_of_the_job_is_ignored(name: str) -> None:
    body = pod(JOB, 0)
    foreign = {**body, "metadata": {**body["metadata"], "name": name}}
    assert observe_pod(foreign, is_tombstone=False) is None
    assert observe_pods([foreign, pod(JOB, 1)], [foreign]) == observe_pods([pod(JOB, 1)], [])


def test_pod_without_an_owner_reference_is_ignored() -> None:
    body = running_pod(job(), 0)
    foreign = {**body, "metadata": {**body["metadata"], "ownerReferences": []}}
    assert observe_pod(foreign, is_tombstone=False) is None


def test_pod_missing_without_observed_termination_or_deletion_counts_as_disappeared() -> None:
    bodies = (running_pod(JOB, 0), pod(JOB, 0), terminating_pod(running_pod(JOB, 0)), finished_pod(JOB, 0))
    assert [observe_single_pod(body, is_tombstone=True).has_disappeared for body in bodies] == [
        True,
        True,
        False,
        False,
    ]
    assert not observe_single_pod(running_pod(JOB, 0)).has_disappeared


def test_container_restarted_in_place_counts_as_terminated_but_may_still_run() -> None:
    restarted_pod = running_pod(JOB, 0)
    first = {"terminated": {"exitCode": 143, "finishedAt": "2026-01-01T12:00:00Z"}}
    restarted_pod["status"]["containerStatuses"][0] |= {"restartCount": 1, "lastState": first}
    node = observe_single_pod(restarted_pod)
    assert (node.was_restarted, node.phase, node.evidence.ended, node.evidence.exit_code) == (
        True,
        PodPhase.RUNNING,
        True,
        143,
    )
    assert node.may_run(NOW)
    assert not observe_single_pod(running_pod(JOB, 0)).was_restarted


def test_last_state_of_an_evicted_pod_does_not_count_as_a_restart() -> None:
    """The kubelet reports the terminated state in lastState, and ContainerCreating as the current state."""
    last = {"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown"}}
    waiting = {"name": "trainer", "state": {"waiting": {"reason": "ContainerCreating"}}, "lastState": last}
    evicted: RawBody = {
        "reason": "Evicted",
        "message": "Usage of EmptyDir volume exceeds the limit.",
        "phase": "Failed",
    }
    node = observe_single_pod(pod(JOB, 0, containerStatuses=[{**waiting, "restartCount": 1}], **evicted))

    assert (node.was_restarted, node.phase, node.evidence.reason) == (False, PodPhase.FAILED, "Evicted")
    assert judge_node(node.evidence).reason == "Evicted"


def test_a_pod_on_a_lost_kubernetes_node_is_fenced_after_its_deletion_deadline() -> None:
    fenced = NOW + timedelta(seconds=FENCED_AFTER_SECONDS)
    body = terminating_pod(running_pod(JOB, 0), deadline=NOW)
    taint = build_condition("DisruptionTarget", "True", reason="DeletionByTaintManager")
    lost_node = observe_single_pod({**body, "status": {**body["status"], "conditions": [taint]}})
    assert lost_node.may_run(fenced - timedelta(seconds=1))
    assert not lost_node.may_run(fenced)
    overdue = NOW + timedelta(seconds=OVERDUE_SECONDS)  # time limit for other disruption reasons, such as a drain
    assert observe_single_pod(body).may_run(overdue - timedelta(seconds=1))
    assert not observe_single_pod(body).may_run(overdue)


def test_a_deleted_pod_without_a_kubernetes_node_never_runs() -> None:
    """Kueue's finalizer keeps a preempted pod that was not scheduled yet."""
    body = terminating_pod(pod(JOB, 0), deadline=NOW)
    del body["spec"]["nodeName"]

    assert not observe_single_pod(body).may_run(NOW)


def test_live_pod_takes_precedence_over_its_own_tombstone() -> None:
    assert [node.phase for node in observe_pods([running_pod(JOB, 0)], [running_pod(JOB, 0), pod(JOB, 1)])] == [
        PodPhase.RUNNING,
        PodPhase.GONE,
    ]


def replace_uid(body: RawBody, uid: str) -> RawBody:
    return {**body, "metadata": {**body["metadata"], "uid": uid}}


def test_live_pod_takes_precedence_over_another_tombstone_of_its_rank() -> None:
    live, tombstone = replace_uid(pod(JOB, 0), "new"), replace_uid(pod(JOB, 0), "old")
    observation = Observation(nodes=observe_pods([live], [tombstone]))
    reversed_observation = Observation(nodes=tuple(reversed(observation.nodes)))
    assert [node.uid for node in observation.nodes_of_attempt(0)] == ["new"]
    assert [node.uid for node in reversed_observation.nodes_of_attempt(0)] == ["new"]


def test_latest_tombstone_of_a_rank_is_used() -> None:
    observation = Observation(
        nodes=observe_pods([], [replace_uid(pod(JOB, 0), "first"), replace_uid(pod(JOB, 0), "last")])
    )
    assert [node.uid for node in observation.nodes_of_attempt(0)] == ["last"]


def test_nodes_of_an_attempt_are_sorted_by_rank() -> None:
    observation = Observation(
        nodes=observe_pods([pod(JOB, 1), pod(JOB, 0, attempt=1), pod(JOB, 0)], [pod(JOB, 1, attempt=1)])
    )
    assert [node.pod_name for node in observation.nodes_of_attempt(0)] == ["bert-0-0", "bert-0-1"]
    assert [node.pod_name for node in observation.nodes_of_attempt(1)] == ["bert-1-0", "bert-1-1"]
    assert [node.pod_name for node in observation.live_nodes()] == ["bert-0-1", "bert-1-0", "bert-0-0"]


def pod_with_init_container(state: RawBody, trainer_state: RawBody) -> RawBody:
    """Return a pod whose init container and trainer container have these states."""
    statuses = {"initContainerStatuses": [{"name": "istio-init", "state": state}]}
    return pod_with_container_state(trainer_state, **statuses)


def test_failed_init_container_counts_as_a_failure_of_the_node() -> None:
    node = observe_single_pod(
        pod_with_init_container({"terminated": {"exitCode": 1, "message": "disk full"}}, INITIALIZING)
    )

    assert node.phase is PodPhase.FAILED
    assert (node.evidence.exit_code, node.evidence.message) == (1, "disk full")


@pytest.mark.parametrize("trainer_state", [{"running": {}}, {"terminated": {"exitCode": 0}}], ids=["running", "ended"])
def test_failed_init_container_is_ignored_after_the_trainer_started(trainer_state: RawBody) -> None:
    node = observe_single_pod(pod_with_init_container({"terminated": {"exitCode": 143}}, trainer_state))

    assert node.phase is not PodPhase.FAILED


@pytest.mark.parametrize("seconds", [-(2**63), -1, 0, 2**63 - 1])
def test_deletion_is_requested_at_or_before_its_deadline(seconds: int) -> None:
    body = terminating_pod(running_pod(JOB, 0))
    body["metadata"]["deletionGracePeriodSeconds"] = seconds
    node = observe_single_pod(body)

    assert node.deletion_requested_at is not None
    assert node.deletion_deadline is not None
    assert node.deletion_requested_at <= node.deletion_deadline
