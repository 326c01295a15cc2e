"""What is read from a pod: raw bodies as an API server shows them, and the observation they become."""

from datetime import timedelta
from typing import Any

import pytest

from finetune_operator import names
from finetune_operator.failures.rules import judge_node
from finetune_operator.observation.pods import (
    FENCED_AFTER_SECONDS,
    OVERDUE_SECONDS,
    Life,
    NodeObservation,
    Observation,
    Waiting,
    observe_pod,
    observe_pods,
)
from testing.builders.jobs import NOW, Raw, deleting, ended, job, pod, running

OF = job()
INITIALIZING = {"waiting": {"reason": "PodInitializing"}}


def look(body: Raw, *, gone: bool = False) -> NodeObservation:
    node = observe_pod(body, gone=gone)
    assert node is not None
    return node


def container(state: Raw, **status: Any) -> Raw:
    """The pod of node 0 whose trainer is in this state."""
    return pod(OF, 0, containerStatuses=[{"name": names.CONTAINER, "state": state}], **status)


def waiting(reason: str, **fields: str) -> Raw:
    return container({"waiting": {"reason": reason, **fields}})


def condition(kind: str, status: str, **fields: str) -> Raw:
    return {"type": kind, "status": status, **fields}


@pytest.mark.parametrize(
    ("body", "life"),
    [
        pytest.param(pod(OF, 0), Life.PENDING, id="made"),
        pytest.param(waiting("ContainerCreating"), Life.PENDING, id="being made ready"),
        pytest.param(container({}, phase="Running"), Life.PENDING, id="a phase alone runs nothing"),
        pytest.param(running(OF, 0), Life.RUNNING, id="runs"),
        pytest.param(container({"running": {}}), Life.RUNNING, id="runs before its phase says so"),
        pytest.param(container({"terminated": {"exitCode": 0}}, phase="Running"), Life.SUCCEEDED, id="ended well"),
        pytest.param(container({"terminated": {"exitCode": 1}}, phase="Running"), Life.FAILED, id="ended badly"),
        pytest.param(container({"terminated": {"exitCode": 0}}, phase="Failed"), Life.SUCCEEDED, id="its own exit"),
        pytest.param(container({"terminated": {}}), Life.FAILED, id="ended without an exit code"),
        pytest.param(pod(OF, 0, phase="Failed", reason="Evicted"), Life.FAILED, id="evicted before it began"),
        pytest.param(pod(OF, 0, phase="Succeeded"), Life.SUCCEEDED, id="a phase without a container"),
        pytest.param(pod(OF, 0, phase="Unknown"), Life.PENDING, id="a kubelet that is silent"),
    ],
)
def test_a_life_is_read_from_the_container_before_the_phase(body: Raw, life: Life) -> None:
    assert look(body).life is life


def test_a_pod_that_nobody_looked_at_yet_is_pending() -> None:
    body = {key: value for key, value in pod(OF, 0).items() if key != "status"}
    assert (look(body).life, look(body).waiting) == (Life.PENDING, None)


def test_a_pod_that_is_gone_runs_nothing_whatever_it_was_last_seen_to_do() -> None:
    there, gone = look(running(OF, 0)), look(running(OF, 0), gone=True)
    assert (there.ended, there.may_run(NOW), there.evidence.ended) == (False, True, False)
    assert (gone.ended, gone.may_run(NOW), gone.evidence.ended) == (True, False, True)


def test_another_container_of_the_pod_says_nothing_of_the_trainer() -> None:
    sidecar = {"name": "proxy", "state": {"terminated": {"exitCode": 1}}}
    trainer = {"name": names.CONTAINER, "state": {"running": {}}}
    assert look(pod(OF, 0, containerStatuses=[sidecar, trainer])).life is Life.RUNNING
    assert look(pod(OF, 0, containerStatuses=[sidecar])).life is Life.PENDING


@pytest.mark.parametrize("reason", ["ContainerCreating", "PodInitializing"])
def test_being_made_ready_is_no_reason_to_wait(reason: str) -> None:
    assert look(waiting(reason)).waiting is None


def test_a_container_that_cannot_start_says_why() -> None:
    assert look(waiting("ErrImagePull", message="not found")).waiting == Waiting("ErrImagePull", "not found")
    assert look(waiting("ImagePullBackOff")).waiting == Waiting("ImagePullBackOff", "")


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        pytest.param(
            [condition("PodScheduled", "False", reason="Unschedulable", message="0/3 nodes")],
            Waiting("Unschedulable", "0/3 nodes"),
            id="no room",
        ),
        pytest.param(
            [condition("PodScheduled", "False", reason="SchedulingGated")], Waiting("SchedulingGated", ""), id="gated"
        ),
        pytest.param([condition("PodScheduled", "False")], Waiting("Unschedulable", ""), id="without a reason"),
        pytest.param([condition("PodScheduled", "True")], None, id="placed"),
        pytest.param([condition("Ready", "False", reason="ContainersNotReady")], None, id="not ready is no reason"),
    ],
)
def test_a_pod_without_a_place_says_why(conditions: list[Raw], expected: Waiting | None) -> None:
    assert look(pod(OF, 0, conditions=conditions)).waiting == expected


def test_a_container_is_being_made_since_the_pod_was_placed_or_got_its_volumes() -> None:
    since = {"lastTransitionTime": "2026-01-01T12:00:00Z"}
    assert look(pod(OF, 0, conditions=[{**condition("PodScheduled", "False"), **since}])).making_since is None
    assert look(pod(OF, 0, conditions=[condition("PodScheduled", "True")])).making_since is None
    placed = {**condition("PodScheduled", "True"), **since}
    assert look(pod(OF, 0, conditions=[placed])).making_since == NOW
    for ready, making_since in (("False", NOW), ("True", NOW + timedelta(minutes=1))):
        later = {**condition("PodReadyToStartContainers", ready), "lastTransitionTime": "2026-01-01T12:01:00Z"}
        assert look(pod(OF, 0, conditions=[placed, later])).making_since == making_since


def test_a_pod_has_a_place_as_soon_as_it_has_a_node() -> None:
    placed = pod(OF, 0)
    nowhere = {**placed, "spec": {key: value for key, value in placed["spec"].items() if key != "nodeName"}}
    assert (look(placed).scheduled, look(placed).k8s_node) == (True, "gpu-0")
    assert (look(nowhere).scheduled, look(nowhere).k8s_node) == (False, "")


@pytest.mark.parametrize("edit", [{}, {names.ATTEMPT: "7"}, {names.NODE_RANK: "first"}, {names.MANAGED_BY: ""}])
def test_a_pod_is_known_by_its_name_and_owner_which_nobody_can_edit(edit: dict[str, str]) -> None:
    body = pod(OF, 1, attempt=3)
    edited = {**body, "metadata": {**body["metadata"], "labels": {**body["metadata"]["labels"], **edit}}}
    node = look(edited)
    assert (node.attempt, node.node_rank, node.hidden) == (3, 1, False)


@pytest.mark.parametrize("labels", [None, {}, {names.ATTEMPT: "0"}, {names.JOB_UID: "another"}])
def test_without_the_label_of_its_job_it_is_hidden_from_the_watches(labels: dict[str, str] | None) -> None:
    body = pod(OF, 0)
    edited = {**body, "metadata": {**body["metadata"], "labels": labels}}
    assert look(edited).hidden
    assert not look(edited, gone=True).hidden


@pytest.mark.parametrize("name", ["bert", "bert-0", "bert-0-1-2", "bert-0-1000", "bert-x-0", "bert--1-0", "other-0-0"])
def test_a_pod_of_the_job_with_a_name_that_we_do_not_give_is_no_node(name: str) -> None:
    body = pod(OF, 0)
    foreign = {**body, "metadata": {**body["metadata"], "name": name}}
    assert observe_pod(foreign, gone=False) is None
    assert observe_pods([foreign, pod(OF, 1)], [foreign]) == observe_pods([pod(OF, 1)], [])


def test_a_pod_that_the_job_does_not_own_is_no_node_whatever_its_labels_say() -> None:
    body = running(job(), 0)
    foreign = {**body, "metadata": {**body["metadata"], "ownerReferences": []}}
    assert observe_pod(foreign, gone=False) is None


def test_a_pod_that_is_gone_was_missed_if_nobody_saw_it_end_or_be_deleted() -> None:
    vanished = (running(OF, 0), pod(OF, 0), deleting(running(OF, 0)), ended(OF, 0))
    assert [look(body, gone=True).missed for body in vanished] == [True, True, False, False]
    assert not look(running(OF, 0)).missed


def test_a_container_that_a_kubelet_started_once_more_ended_though_something_runs() -> None:
    again = running(OF, 0)
    first = {"terminated": {"exitCode": 143, "finishedAt": "2026-01-01T12:00:00Z"}}
    again["status"]["containerStatuses"][0] |= {"restartCount": 1, "lastState": first}
    node = look(again)
    assert (node.restarted, node.life, node.evidence.ended, node.evidence.exit_code) == (True, Life.RUNNING, True, 143)
    assert node.may_run(NOW)
    assert not look(running(OF, 0)).restarted


def test_a_container_that_its_kubelet_finds_gone_while_it_evicts_was_not_started_once_more() -> None:
    """Its end is told as that of a container before, and the present one as about to be made."""
    last = {"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown"}}
    waiting = {"name": "trainer", "state": {"waiting": {"reason": "ContainerCreating"}}, "lastState": last}
    told: Raw = {"reason": "Evicted", "message": "Usage of EmptyDir volume exceeds the limit.", "phase": "Failed"}
    node = look(pod(OF, 0, containerStatuses=[{**waiting, "restartCount": 1}], **told))

    assert (node.restarted, node.life, node.evidence.reason) == (False, Life.FAILED, "Evicted")
    assert judge_node(node.evidence).reason == "Evicted"


def test_a_lost_machine_is_given_up_some_time_after_its_pods_deadline() -> None:
    fenced = NOW + timedelta(seconds=FENCED_AFTER_SECONDS)
    body = deleting(running(OF, 0), deadline=NOW)
    taint = condition("DisruptionTarget", "True", reason="DeletionByTaintManager")
    lost = look({**body, "status": {**body["status"], "conditions": [taint]}})
    assert lost.may_run(fenced - timedelta(seconds=1))
    assert not lost.may_run(fenced)
    overdue = NOW + timedelta(seconds=OVERDUE_SECONDS)  # a drain of a dead node leaves another reason
    assert look(body).may_run(overdue - timedelta(seconds=1))
    assert not look(body).may_run(overdue)


def test_a_deletion_shows_with_its_deadline() -> None:
    dying = look(deleting(running(OF, 0), deadline=NOW))
    assert (dying.deleting, dying.deletion_deadline) == (True, NOW)
    assert (look(running(OF, 0)).deleting, look(running(OF, 0)).deletion_deadline) == (False, None)


def test_a_pod_that_is_both_there_and_remembered_is_there() -> None:
    assert [node.life for node in observe_pods([running(OF, 0)], [running(OF, 0), pod(OF, 1)])] == [
        Life.RUNNING,
        Life.GONE,
    ]


def renamed(body: Raw, uid: str) -> Raw:
    return {**body, "metadata": {**body["metadata"], "uid": uid}}


def test_of_a_rank_the_pod_that_is_there_wins_over_the_remembered() -> None:
    there, before = renamed(pod(OF, 0), "new"), renamed(pod(OF, 0), "old")
    seen = Observation(nodes=observe_pods([there], [before]))
    backwards = Observation(nodes=tuple(reversed(seen.nodes)))
    assert [node.uid for node in seen.of_attempt(0)] == ["new"]
    assert [node.uid for node in backwards.of_attempt(0)] == ["new"]


def test_of_two_remembered_pods_of_a_rank_the_one_that_went_last_wins() -> None:
    seen = Observation(nodes=observe_pods([], [renamed(pod(OF, 0), "first"), renamed(pod(OF, 0), "last")]))
    assert [node.uid for node in seen.of_attempt(0)] == ["last"]


def test_nodes_of_an_attempt_come_by_rank_and_without_those_of_others() -> None:
    seen = Observation(nodes=observe_pods([pod(OF, 1), pod(OF, 0, attempt=1), pod(OF, 0)], [pod(OF, 1, attempt=1)]))
    assert [node.pod_name for node in seen.of_attempt(0)] == ["bert-0-0", "bert-0-1"]
    assert [node.pod_name for node in seen.of_attempt(1)] == ["bert-1-0", "bert-1-1"]
    assert [node.pod_name for node in seen.live()] == ["bert-0-1", "bert-1-0", "bert-0-0"]


def before(state: Raw, own: Raw) -> Raw:
    """A pod with an init container in one state and the trainer in another."""
    statuses = {"initContainerStatuses": [{"name": "istio-init", "state": state}]}
    return container(own, **statuses)


def test_what_the_container_before_the_trainer_waits_for_is_waited_for() -> None:
    node = look(before({"waiting": {"reason": "ErrImagePull", "message": "no such tag"}}, INITIALIZING))

    assert node.life is Life.PENDING
    assert node.waiting == Waiting("ErrImagePull", "no such tag", "the image of istio-init")


def test_a_container_before_the_trainer_that_failed_is_the_end() -> None:
    node = look(before({"terminated": {"exitCode": 1, "message": "disk full"}}, INITIALIZING))

    assert node.life is Life.FAILED
    assert (node.evidence.exit_code, node.evidence.message) == (1, "disk full")


@pytest.mark.parametrize("own", [{"running": {}}, {"terminated": {"exitCode": 0}}], ids=["runs", "ended"])
def test_once_the_trainer_began_the_others_do_not_count(own: Raw) -> None:
    node = look(before({"terminated": {"exitCode": 143}}, own))

    assert node.life is not Life.FAILED
