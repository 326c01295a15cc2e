"""Tests of decisions about jobs whose pods are scheduled as a group."""

from datetime import timedelta
from typing import Any

import pytest

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.scheduling import SchedulingProvider, SchedulingStatus
from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, Fault, JobStatus
from finetune_operator.core.actions import Create, DeletePodGroup
from finetune_operator.core.decision import Decision
from finetune_operator.names import KUEUE_MANAGED
from finetune_operator.observation.group_apis import GroupApis, find_group_apis
from finetune_operator.observation.pods import RejectedCreate
from testing.builders.jobs import NOW, UID, decide_with, finished_pod, job, pod, running_pod

BETA = "scheduling.k8s.io/v1beta1"
NATIVE = SchedulingStatus(provider="PodGroup", api_version=BETA)
ENDED = AttemptRecord(attempt=0, state=AttemptState.FAILED, created=True, fault=Fault.INFRASTRUCTURE, action="Restart")


def build_job(
    *earlier: AttemptRecord, chosen: SchedulingStatus | None = None, num_nodes: int = 2, **scheduling: Any
) -> FineTuneJob:
    record = AttemptRecord(attempt=len(earlier), state=AttemptState.STARTING, start_time=NOW, pending_since=NOW)
    status = JobStatus(attempt=record.attempt, attempts=(*earlier, record), start_time=NOW, scheduling=chosen)
    return job(status=status, numNodes=num_nodes, scheduling=scheduling)


def list_created_kinds(decision: Decision) -> list[str]:
    return [action.manifest["kind"] for action in decision.actions if isinstance(action, Create)]


def test_provider_is_recorded_before_the_first_pod_is_created() -> None:
    new = build_job()
    apis = find_group_apis([BETA, "scheduling.volcano.sh/v1beta1"])

    chosen, recorded = decide_with(new, group_apis=apis)
    _, started = decide_with(chosen, is_fresh=True)

    assert list_created_kinds(recorded) == []
    assert chosen.status.scheduling == NATIVE
    assert list_created_kinds(started) == ["ConfigMap", "PodGroup", "Pod", "Pod"]


@pytest.mark.parametrize(
    ("scheduling", "apis", "message"),
    [
        pytest.param(
            {},
            GroupApis(),
            "nothing in the cluster schedules the pods as a group: PodGroup is not installed; Coscheduling is not"
            " installed; Volcano is not installed",
            id="nothing",
        ),
        pytest.param({"queueName": "gpus"}, find_group_apis([BETA]), "Kueue is not installed; Volcano is", id="queue"),
        pytest.param(
            {"provider": "PodGroup"},
            GroupApis({SchedulingProvider.POD_GROUP: BETA}, {SchedulingProvider.POD_GROUP: "is not enabled"}),
            "PodGroup is not enabled",
            id="feature gate",
        ),
    ],
)
def test_job_waits_while_nothing_schedules_its_pods_as_a_group(
    scheduling: dict[str, Any], apis: GroupApis, message: str
) -> None:
    new = build_job(**scheduling)

    waiting, decision = decide_with(new, group_apis=apis)

    assert waiting.status.waiting is not None
    assert waiting.status.waiting.reason == "NoGroupScheduler"
    assert message in waiting.status.waiting.message
    assert "Pod" not in list_created_kinds(decision)
    assert decision.requeue_after is not None
    assert decision.requeue_after <= timedelta(seconds=15)


def test_next_attempt_chooses_again_and_deletes_the_last_pod_group() -> None:
    """An upgrade of the cluster may have replaced the version of the API."""
    restarted = build_job(ENDED, chosen=NATIVE)

    _, decision = decide_with(restarted, is_fresh=True)

    assert DeletePodGroup(f"bert-0-{UID[:8]}", BETA) in decision.actions


def test_pod_groups_before_an_attempt_without_pods_are_deleted_too() -> None:
    suspended = ENDED.model_copy(update={"attempt": 2, "state": AttemptState.STOPPED, "created": False})
    earlier = (ENDED, ENDED.model_copy(update={"attempt": 1}), suspended)
    resumed = build_job(*earlier, chosen=NATIVE)

    _, decision = decide_with(resumed, is_fresh=True)

    deletions = [action for action in decision.actions if isinstance(action, DeletePodGroup)]
    assert deletions == [DeletePodGroup(f"bert-{attempt}-{UID[:8]}", BETA) for attempt in (1, 2)]


def test_pod_that_disappeared_beside_a_succeeded_node_is_not_created_again() -> None:
    """A gang never starts with one new pod, because the scheduler waits for all of them."""
    starting = build_job(chosen=NATIVE)

    stopping, decision = decide_with(starting, finished_pod(starting, 0, exit_code=0), is_fresh=True)

    assert list_created_kinds(decision) == []
    assert stopping.status.attempts[-1].state is AttemptState.STOPPING


def test_missing_pod_of_a_placed_group_is_not_created_again() -> None:
    """Without room for the new pod alone, the others would keep their GPUs while they wait for it."""
    starting = build_job(chosen=NATIVE)

    stopping, decision = decide_with(starting, running_pod(starting, 1))

    assert list_created_kinds(decision) == []
    record = stopping.status.attempts[-1]
    assert (record.state, record.reason) == (AttemptState.STOPPING, "GangIncomplete")
    assert "a pod was deleted after the scheduler had placed all pods" in record.message


@pytest.mark.parametrize(
    ("chosen", "fields"),
    [
        pytest.param(NATIVE, {"expected_pods": frozenset({"bert-0-0"})}, id="created seconds ago"),
        pytest.param(
            NATIVE, {"rejected_creates": (RejectedCreate("Pod", "bert-0-0", 403, "exceeded quota"),)}, id="rejected"
        ),
        pytest.param(
            SchedulingStatus(provider="Kueue", api_version="kueue.x-k8s.io/v1beta2", queue_name="gpus"),
            {},
            id="Kueue admits one pod of an admitted group",
        ),
    ],
)
def test_pod_that_may_not_have_existed_does_not_stop_its_group(
    chosen: SchedulingStatus, fields: dict[str, Any]
) -> None:
    starting = build_job(chosen=chosen)
    for _ in range(2):  # the first pass records the defaults, and the second one the hash of the ConfigMap
        starting, _decision = decide_with(starting)
    placed = running_pod(starting, 1)
    placed["metadata"]["labels"][KUEUE_MANAGED] = "true"

    started, _ = decide_with(starting, placed, **fields)

    assert started.status.attempts[-1].state is AttemptState.STARTING


def test_pods_that_lost_their_group_are_replaced() -> None:
    """The API server drops the field if its feature gate is switched off after the provider was chosen."""
    starting = build_job(chosen=NATIVE)
    pods = [pod(starting, rank) for rank in range(2)]
    for body in pods:
        del body["spec"]["nodeName"]
    del pods[1]["spec"]["schedulingGroup"]

    stopping, _ = decide_with(starting, *pods)

    record = stopping.status.attempts[-1]
    assert (record.state, record.reason) == (AttemptState.STOPPING, "GangIncomplete")
    assert record.message == (
        "the API server dropped spec.schedulingGroup of pod bert-0-1 (feature gate GenericWorkload)"
    )


def test_pods_without_a_group_that_all_run_are_kept() -> None:
    starting = build_job(chosen=NATIVE)
    pods = [running_pod(starting, rank) for rank in range(2)]
    for body in pods:
        del body["spec"]["schedulingGroup"]

    running, _ = decide_with(starting, *pods)

    assert running.status.attempts[-1].state is AttemptState.RUNNING


def test_ended_attempt_forgets_its_provider() -> None:
    running = build_job(chosen=NATIVE)
    for _ in range(3):
        pods = (finished_pod(running, rank) for rank in range(2))
        running, _decision = decide_with(running, *pods, is_fresh=True)

    assert running.status.attempt == 1
    assert running.status.scheduling is None


def build_gang_message(*, min_count: int, placed: int, placements: int = 1) -> str:
    return (
        f"pod group is unschedulable, pod group is unschedulable, 0/{placements} placements are available, first"
        f" placement status: minCount ({min_count}) cannot be satisfied: {placed} scheduled, 0 remaining, pod group"
        " preemption: No preemption victims found"
    )


NO_SLOT = "0/2 nodes are available: 2 Insufficient example.com/slot."


@pytest.mark.parametrize("blocked_rank", [0, 2])
@pytest.mark.parametrize(
    ("placements", "explanation"),
    [(1, NO_SLOT), (3, f"{NO_SLOT}; none of the 3 topology domains has room for the group")],
)
def test_pod_for_which_a_gang_has_no_room_explains_the_wait(
    blocked_rank: int, placements: int, explanation: str
) -> None:
    """The scheduler considers the pods of a group in any order, so each rank can be the one without room."""
    messages = [build_gang_message(min_count=3, placed=1, placements=placements)] * 3
    messages[blocked_rank] = NO_SLOT

    assert decide_wait_message(*messages) == f"2 of 3 pods cannot be placed: {explanation}"


def test_message_about_a_gang_is_explained_while_no_pod_without_room_is_known() -> None:
    message = build_gang_message(min_count=3, placed=2)

    assert decide_wait_message(message, message, None) == (
        "1 of 3 pods cannot be placed: the scheduler finds room for 2 of 3 pods, and starts all or none"
    )


def decide_wait_message(*scheduler_messages: str | None) -> str:
    """Return the message of the wait of a job whose pods have these messages; None is a pod not considered yet."""
    waiting = build_job(chosen=NATIVE, num_nodes=len(scheduler_messages))
    pods = []
    for rank, message in enumerate(scheduler_messages):
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        pods.append(pod(waiting, rank, conditions=[condition] if message else []))
    waiting, _ = decide_with(waiting, *pods)
    assert waiting.status.waiting is not None
    return waiting.status.waiting.message


def test_provider_of_a_newer_release_is_chosen_again() -> None:
    status = JobStatus.model_validate({"scheduling": {"provider": "Newer", "apiVersion": "example.com/v1"}})

    assert status.scheduling is None
