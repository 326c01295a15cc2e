"""Tests of the decisions about a job in a queue of Kueue."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.scheduling import SchedulingStatus
from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, JobStatus, Phase
from finetune_operator.core.actions import Create, DeletePod, DeleteWorkload
from finetune_operator.core.decision import Decision
from finetune_operator.observation.group_apis import find_group_apis
from finetune_operator.observation.pods import Observation
from finetune_operator.observation.workload import WorkloadObservation
from testing.builders.jobs import (
    NOW,
    UID,
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

KUEUE = SchedulingStatus(provider="Kueue", api_version="kueue.x-k8s.io/v1beta2", queue_name="gpus")
RELEASE = DeleteWorkload(f"bert-{UID[:8]}")
GATED: dict[str, Any] = {
    "conditions": [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "gates"}]
}


def build_job(state: AttemptState, *earlier: AttemptRecord, **fields: Any) -> FineTuneJob:
    record = AttemptRecord(attempt=len(earlier), state=state, start_time=NOW, pending_since=NOW, created=True)
    status = JobStatus(attempt=record.attempt, attempts=(*earlier, record), start_time=NOW, scheduling=KUEUE)
    return job(status=status, scheduling={"queueName": "gpus"}, **fields)


def hold(body: RawBody) -> RawBody:
    """Return the pod as Kueue's webhook changes it."""
    metadata = body["metadata"]
    labels = {**metadata["labels"], "kueue.x-k8s.io/managed": "true"}
    return {**body, "metadata": {**metadata, "labels": labels, "finalizers": ["kueue.x-k8s.io/managed"]}}


def select_releases(decision: Decision) -> list[DeleteWorkload]:
    return [action for action in decision.actions if isinstance(action, DeleteWorkload)]


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (None, "Kueue has not created a Workload for LocalQueue gpus yet"),
        (WorkloadObservation(""), "LocalQueue gpus: Kueue has not considered the job yet"),
        (WorkloadObservation("insufficient quota"), "LocalQueue gpus: insufficient quota"),
        (WorkloadObservation("no room", position=2), "number 3 in LocalQueue gpus: no room"),
        (
            WorkloadObservation("its pods were not ready in time", requeue_at="2026-01-01T12:00:00Z"),
            "LocalQueue gpus: its pods were not ready in time; Kueue considers it again at 2026-01-01T12:00:00Z",
        ),
        (WorkloadObservation("", is_active=False), "the Workload in LocalQueue gpus is deactivated; set its spec"),
    ],
)
def test_wait_for_kueue_is_explained(workload: WorkloadObservation | None, message: str) -> None:
    queued = build_job(AttemptState.STARTING)
    pods = (hold(pod(queued, rank, **GATED)) for rank in range(2))

    queued, decision = decide_with(queued, *pods, waits_for_queue=True, workload=workload)

    assert queued.status.waiting is not None
    assert queued.status.waiting.reason == "WaitingInQueue"
    assert queued.status.waiting.message.startswith(message)
    assert decision.requeue_after == timedelta(seconds=15)


@pytest.mark.parametrize(
    ("waited", "position", "seconds"),
    [
        pytest.param(timedelta(minutes=2), 10, 15, id="short"),
        pytest.param(timedelta(minutes=2), 200, 200, id="many ahead"),
        pytest.param(timedelta(minutes=20), 10, 120, id="long"),
        pytest.param(timedelta(days=2), 10, 300, id="very long"),
        pytest.param(timedelta(), 999, 300, id="very many ahead"),
    ],
)
def test_workload_is_read_less_often_the_longer_the_job_waits(waited: timedelta, position: int, seconds: int) -> None:
    """With many waiting jobs, the cost of displaying all their positions would be quadratic."""
    queued = build_job(AttemptState.STARTING)
    pods = (hold(pod(queued, rank, **GATED)) for rank in range(2))
    observation = build_observation(
        queued, *pods, waits_for_queue=True, workload=WorkloadObservation("no room", position=position)
    )

    _, decision = decide_once(queued, observation, now=NOW + waited)

    assert decision.requeue_after == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("gates", "reason"),
    [
        pytest.param(("kueue.x-k8s.io/admission", "acme.example/approval"), "WaitingInQueue", id="of Kueue"),
        pytest.param(("acme.example/approval",), "SchedulingGated", id="of others only"),
    ],
)
def test_gates_of_others_are_named_once_kueue_has_admitted_the_pods(gates: tuple[str, ...], reason: str) -> None:
    queued = build_job(AttemptState.STARTING)
    pods = [hold(pod(queued, rank, **GATED)) for rank in range(2)]
    for body in pods:
        body["spec"]["schedulingGates"] = [{"name": gate} for gate in gates]

    queued, _ = decide_with(queued, *pods, workload=WorkloadObservation(""))

    assert queued.status.waiting is not None
    assert queued.status.waiting.reason == reason
    if reason == "SchedulingGated":
        expected = "2 of 2 pods wait until other controllers remove scheduling gates: acme.example/approval"
        assert queued.status.waiting.message == expected


def test_job_fails_if_kueue_ignores_its_pods() -> None:
    ignored = build_job(AttemptState.RUNNING)

    ignored, _ = decide_with(ignored, *(running_pod(ignored, rank) for rank in range(2)))

    assert ignored.status.phase is Phase.FAILED
    assert ignored.status.attempts[-1].reason == "QueueIgnored"
    assert "bert-0-0 is not managed by Kueue" in ignored.status.attempts[-1].message


def observe_held(owner: FineTuneJob, *bodies: RawBody) -> Observation:
    return build_observation(owner, *(hold(body) for body in bodies))


def test_suspended_job_returns_its_quota_once_no_pod_runs() -> None:
    suspended = build_job(AttemptState.STOPPED, suspend=True)

    _, running = decide_once(suspended, observe_held(suspended, running_pod(suspended, 0), finished_pod(suspended, 1)))
    _, stopped = decide_once(suspended, observe_held(suspended, finished_pod(suspended, 0), finished_pod(suspended, 1)))
    _, released = decide_with(suspended)

    assert [select_releases(decision) for decision in (running, stopped, released)] == [[], [RELEASE], []]


def delete_unscheduled(body: RawBody, **status: Any) -> RawBody:
    """Return the pod, deleted before it was assigned to a Kubernetes node and kept by Kueue's finalizer."""
    spec = {key: value for key, value in body["spec"].items() if key != "nodeName"}
    return terminating_pod({**body, "spec": spec, "status": {"phase": "Pending", **status}})


def test_queued_job_returns_its_quota_at_once_if_it_is_suspended() -> None:
    queued = build_job(AttemptState.STARTING, suspend=True)
    observation = observe_held(queued, *(delete_unscheduled(pod(queued, rank), **GATED) for rank in range(2)))

    stopping, _ = decide_once(queued, observation)
    stopped, _ = decide_once(stopping, observation)
    _, decision = decide_once(stopped, observation)

    assert select_releases(decision) == [RELEASE]


def test_preempted_job_is_queued_again_at_once_if_its_pods_were_not_scheduled() -> None:
    preempted = build_job(AttemptState.STARTING)
    message = "Preempted to accommodate a workload (UID: 527a9fa8-fb86-4116-b295-4f4dd72e478f, JobUID: UNKNOWN)"
    reason = "WorkloadEvictedDueToPreempted"
    condition = {"type": "TerminationTarget", "status": "True", "reason": reason, "message": message}
    bodies = (delete_unscheduled(pod(preempted, rank), conditions=[condition]) for rank in range(2))
    observation = replace(observe_held(preempted, *bodies), group_apis=find_group_apis([KUEUE.api_version]))

    stopping, _ = decide_once(preempted, observation)
    restarted, _ = decide_once(stopping, observation)
    chosen, _ = decide_once(restarted, observation)
    _, decision = decide_once(chosen, observation)

    assert restarted.status.attempts[0].reason == "Preempted"
    assert restarted.status.without_progress.infrastructure == 0
    assert chosen.status.scheduling == KUEUE
    assert select_releases(decision) == []
    created = [action.name for action in decision.actions if isinstance(action, Create)]
    assert [name for name in created if name.startswith("Pod")] == ["Pod bert-1-0", "Pod bert-1-1"]


def test_ended_job_returns_its_quota() -> None:
    """Kueue itself releases pods that have all succeeded; deleting the Workload would delete them with their logs."""
    failed, complete = build_job(AttemptState.FAILED), build_job(AttemptState.SUCCEEDED)
    failed, complete = (
        ended.model_copy(update={"status": ended.status.model_copy(update={"completion_time": NOW})})
        for ended in (failed, complete)
    )
    after = NOW + timedelta(seconds=31)

    _, failed_decision = decide_once(failed, observe_held(failed, finished_pod(failed, 0)))
    _, early = decide_once(complete, observe_held(complete, finished_pod(complete, 0, exit_code=0)))
    _, late = decide_once(complete, observe_held(complete, finished_pod(complete, 0, exit_code=0)), now=after)

    assert [select_releases(decision) for decision in (failed_decision, early, late)] == [[RELEASE], [], [RELEASE]]
    assert early.requeue_after == timedelta(seconds=30)


def build_restarted_job(**last_attempt: Any) -> FineTuneJob:
    """Return a job whose second attempt has no pods yet."""
    last = AttemptRecord(attempt=0, state=AttemptState.FAILED, created=True, **last_attempt)
    restarted = build_job(AttemptState.STARTING, last)
    record = restarted.status.attempts[-1].model_copy(update={"created": False})
    status = restarted.status.model_copy(update={"attempts": (last, record)})
    return restarted.model_copy(update={"status": status})


@pytest.mark.parametrize(
    ("last_attempt", "leaves_group"),
    [
        pytest.param({"action": "Restart"}, False, id="restart"),
        pytest.param({"action": "Repair"}, True, id="repair"),
        pytest.param({"action": "Suspend"}, True, id="spec may have changed while suspended"),
        pytest.param({"action": "Restart", "avoids": ("gpu-3",)}, True, id="other nodes avoided"),
    ],
)
def test_group_is_queued_again_only_if_its_pods_change(last_attempt: dict[str, Any], leaves_group: bool) -> None:
    restarted = build_restarted_job(**last_attempt)
    ended_pods = [finished_pod(restarted, rank) for rank in range(2)]

    _, decision = decide_once(restarted, observe_held(restarted, *ended_pods))
    _, released = decide_with(restarted)

    assert bool(select_releases(decision)) is leaves_group
    assert any(isinstance(action, Create) for action in decision.actions) is not leaves_group
    assert any(isinstance(action, Create) for action in released.actions)


def test_restart_waits_until_the_phase_of_every_pod_is_reported() -> None:
    """Kueue counts a pod as running until its phase is Failed, and deletes a new pod in excess of the group."""
    restarted = build_restarted_job(action="Restart")
    ended = finished_pod(restarted, 0, finishedAt=NOW.isoformat())
    ending = {**ended, "status": {**ended["status"], "phase": "Running"}}

    _, waiting = decide_once(restarted, observe_held(restarted, ending, finished_pod(restarted, 1)))

    assert [type(action) for action in waiting.actions] == [DeletePod]


def test_group_with_a_succeeded_pod_is_queued_again() -> None:
    """Kueue never replaces a succeeded pod."""
    restarted = build_restarted_job(action="Restart")

    _, decision = decide_once(
        restarted, observe_held(restarted, finished_pod(restarted, 0, exit_code=0), finished_pod(restarted, 1))
    )

    assert decision.actions == (RELEASE,)


@pytest.mark.parametrize("is_held", [True, False])
def test_pod_of_a_lost_kubernetes_node_is_removed_from_the_group(is_held: bool) -> None:
    """Kueue counts it as running, even without its finalizer."""
    restarted = build_restarted_job(action="Restart")
    body = hold(terminating_pod(running_pod(restarted, 1), deadline=NOW - timedelta(minutes=6)))
    lost = body if is_held else {**body, "metadata": {**body["metadata"], "finalizers": []}}

    _, decision = decide_with(restarted, hold(finished_pod(restarted, 0)), lost)

    assert decision.actions == (DeletePod("bert-0-1", "pod-0-1", 0), RELEASE)


def test_job_in_foreground_deletion_returns_its_quota_once_no_pod_runs() -> None:
    """The garbage collector waits for the pods, which have Kueue's finalizer."""
    deleted = build_job(AttemptState.RUNNING, deleted=True)

    _, running = decide_once(deleted, observe_held(deleted, running_pod(deleted, 0), finished_pod(deleted, 1)))
    _, stopped = decide_once(deleted, observe_held(deleted, finished_pod(deleted, 0), finished_pod(deleted, 1)))

    assert (running.actions, stopped.actions) == ((), (RELEASE,))


def test_finished_workload_of_an_earlier_attempt_is_deleted() -> None:
    queued = build_job(AttemptState.STARTING)
    gated = (hold(pod(queued, rank, **GATED)) for rank in range(2))
    workload = WorkloadObservation("", is_finished=True)

    _, decision = decide_with(queued, *gated, workload=workload)

    assert select_releases(decision) == [RELEASE]
