"""Tests of attempts with incomplete gangs."""

import json
from datetime import timedelta
from typing import Any

import pytest

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.status import AttemptState
from finetune_operator.core.actions import Create, DeletePod
from finetune_operator.observation.pods import Observation, RejectedCreate
from testing.builders.jobs import (
    NOW,
    RawBody,
    build_observation,
    decide_once,
    decide_with,
    finished_pod,
    job,
    pod,
    running_pod,
)

NOTHING = Observation(is_fresh=True)


def started_job(**fields: Any) -> FineTuneJob:
    """Return a job whose attempt 0 has started."""
    return decide_once(job(**fields), NOTHING)[0]


def unschedulable_pod(ftjob: FineTuneJob, node_rank: int, *, attempt: int = 0) -> RawBody:
    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes fit"}
    body = pod(ftjob, node_rank, attempt=attempt, conditions=[unschedulable])
    del body["spec"]["nodeName"]
    return body


def job_with_one_running_node(**fields: Any) -> tuple[FineTuneJob, Observation]:
    """Return a job and its observation: node 0 has been running since NOW, and node 1 is unschedulable."""
    ftjob = started_job(**fields)
    one_running = build_observation(ftjob, running_pod(ftjob, 0), unschedulable_pod(ftjob, 1))
    return decide_once(ftjob, one_running)[0], one_running


QUOTA = RejectedCreate("Pod", "bert-0-1", 403, "exceeded quota: gpus")
PREDECESSOR = RejectedCreate(
    "Pod",
    "bert-0-1",
    409,
    "Pod bert-0-1 of a deleted job of the same name is still there",
    predecessor_terminating=True,
)


@pytest.mark.parametrize("rejected_create", [QUOTA, PREDECESSOR], ids=["quota exceeded", "predecessor terminating"])
def test_running_nodes_are_released_if_another_node_cannot_be_created(rejected_create: RejectedCreate) -> None:
    ftjob = started_job(startupDeadlineSeconds=60)
    one_running = build_observation(ftjob, running_pod(ftjob, 0), rejected_creates=(rejected_create,))
    ftjob, _ = decide_once(ftjob, one_running)
    assert decide_once(ftjob, one_running, now=NOW + timedelta(seconds=50))[1].requeue_after == timedelta(seconds=10)
    for _ in range(2):
        ftjob, _ = decide_once(ftjob, one_running, now=NOW + timedelta(seconds=60))
    ftjob, _ = decide_once(ftjob, NOTHING, now=NOW + timedelta(seconds=60))

    assert [record.reason for record in ftjob.status.attempts] == ["GangIncomplete", ""]
    assert rejected_create.message in ftjob.status.attempts[0].message
    assert ftjob.status.without_progress.infrastructure == 0


@pytest.mark.parametrize("rejected_create", [QUOTA, PREDECESSOR], ids=["quota exceeded", "predecessor terminating"])
def test_operator_restart_does_not_delay_the_release_of_running_nodes(rejected_create: RejectedCreate) -> None:
    """Rejected creates are lost when the operator restarts, but the status contains the start of the pending reason."""
    ftjob = started_job(startupDeadlineSeconds=60)
    one_running = build_observation(ftjob, running_pod(ftjob, 0), rejected_creates=(rejected_create,))
    ftjob, _ = decide_once(ftjob, one_running)
    ftjob, retried = decide_with(ftjob, running_pod(ftjob, 0), now=NOW + timedelta(seconds=59))
    assert any(isinstance(action, Create) for action in retried.actions)
    ftjob, _ = decide_once(ftjob, one_running, now=NOW + timedelta(seconds=60))

    assert ftjob.status.attempts[0].state is AttemptState.STOPPING


@pytest.mark.parametrize("rejected_create", [QUOTA, PREDECESSOR], ids=["quota exceeded", "predecessor terminating"])
def test_rendezvous_timeout_caused_by_a_rejected_create_is_not_a_failure(rejected_create: RejectedCreate) -> None:
    ftjob = started_job(restartPolicy={"maxRestarts": 0})
    ftjob, _ = decide_with(ftjob, pod_with_rendezvous_timeout(ftjob, 0), rejected_creates=(rejected_create,))
    ftjob, _ = decide_once(ftjob, NOTHING)

    assert [record.reason for record in ftjob.status.attempts] == ["GangIncomplete", ""]


def test_rejected_creates_are_not_retried_before_the_delay() -> None:
    ftjob = started_job()
    delay = timedelta(seconds=7)
    observation = Observation(is_fresh=True, rejected_creates=(QUOTA,), create_delay=delay)
    ftjob, decision = decide_once(ftjob, observation)
    assert ftjob.status.waiting is not None
    assert (ftjob.status.waiting.reason, decision.requeue_after) == ("CreateRefused", delay)
    assert not any(isinstance(action, Create) for action in decision.actions)


def test_fast_node_clocks_do_not_delay_the_release_of_running_nodes() -> None:
    now = NOW - timedelta(hours=5)
    ftjob = decide_once(job(startupDeadlineSeconds=60), NOTHING, now=now)[0]
    one_running = build_observation(ftjob, running_pod(ftjob, 0), unschedulable_pod(ftjob, 1))
    ftjob, _ = decide_once(ftjob, one_running, now=now)
    ftjob, waiting = decide_once(ftjob, one_running, now=now)
    assert waiting.requeue_after == timedelta(seconds=60)

    ftjob, _ = decide_once(ftjob, one_running, now=now + timedelta(seconds=60))
    assert ftjob.status.attempts[0].state is AttemptState.STOPPING


def test_running_nodes_are_released_at_the_startup_deadline_and_restarted_later() -> None:
    ftjob, one_running = job_with_one_running_node(startupDeadlineSeconds=60)
    ftjob, waiting = decide_once(ftjob, one_running, now=NOW + timedelta(seconds=59))
    assert waiting.requeue_after == timedelta(seconds=1)
    assert ftjob.status.attempts[0].state is AttemptState.STARTING

    released_at = NOW + timedelta(seconds=60)
    ftjob, _ = decide_once(ftjob, one_running, now=released_at)
    _, stopping = decide_once(ftjob, one_running, now=released_at)
    assert {action.name for action in stopping.actions if isinstance(action, DeletePod)} == {"bert-0-0", "bert-0-1"}
    ftjob, _ = decide_once(ftjob, NOTHING, now=released_at)

    released, following = ftjob.status.attempts
    assert (released.reason, ftjob.status.restarts) == ("GangIncomplete", 1)
    assert "1 of 2 pods cannot be placed: 0/3 nodes fit" in released.message
    assert following.not_before is not None
    assert timedelta(seconds=300) <= following.not_before - released_at <= timedelta(seconds=360)
    assert ftjob.status.without_progress.infrastructure == 0


def pod_with_rendezvous_timeout(ftjob: FineTuneJob, node_rank: int, **fields: Any) -> RawBody:
    error = {"errorType": "RendezvousTimeoutError", "message": "node ranks 1 of 2 did not join within 120s", **fields}
    return finished_pod(ftjob, node_rank, message=json.dumps({"final": True, "outcome": "failed", **error}))


def test_rendezvous_timeout_caused_by_an_unschedulable_node_is_not_a_failure() -> None:
    """The rendezvous timeout of a command may be shorter than startupDeadlineSeconds."""
    ftjob, _ = job_with_one_running_node(restartPolicy={"maxRestarts": 0})
    ftjob, _ = decide_with(ftjob, pod_with_rendezvous_timeout(ftjob, 0), unschedulable_pod(ftjob, 1))
    ftjob, _ = decide_once(ftjob, NOTHING)

    released, following = ftjob.status.attempts
    assert (released.reason, following.state) == ("GangIncomplete", AttemptState.STARTING)
    assert "gave up waiting for others: 1 of 2 pods cannot be placed: 0/3 nodes fit" in released.message
    assert ftjob.status.without_progress.counted == 0
    assert following.not_before is not None
    assert following.not_before >= NOW + timedelta(seconds=300)


def test_user_error_ends_the_attempt_even_if_another_node_is_unschedulable() -> None:
    ftjob, _ = job_with_one_running_node()
    failed = pod_with_rendezvous_timeout(ftjob, 0, errorType="DatasetError", message="row 3 has no messages")
    ftjob, _ = decide_with(ftjob, failed, unschedulable_pod(ftjob, 1))
    ftjob, _ = decide_once(ftjob, NOTHING)

    assert ftjob.status.attempts[-1].reason == "DatasetError"


def test_rendezvous_timeout_is_a_failure_if_all_nodes_are_scheduled() -> None:
    ftjob, _ = job_with_one_running_node()
    ftjob, _ = decide_with(ftjob, pod_with_rendezvous_timeout(ftjob, 0), running_pod(ftjob, 1))
    ftjob, _ = decide_once(ftjob, NOTHING)

    assert ftjob.status.attempts[0].reason == "RendezvousTimeout"


def test_startup_deadline_starts_with_the_first_running_node() -> None:
    ftjob = started_job(startupDeadlineSeconds=60)
    ftjob, _ = decide_with(ftjob, unschedulable_pod(ftjob, 0), unschedulable_pod(ftjob, 1))
    first = running_pod(ftjob, 0)
    first["status"]["containerStatuses"][0]["state"]["running"]["startedAt"] = (NOW + timedelta(hours=1)).isoformat()
    one_running = build_observation(ftjob, first, unschedulable_pod(ftjob, 1))

    ftjob, waiting = decide_once(ftjob, one_running, now=NOW + timedelta(hours=1, seconds=1))

    assert ftjob.status.attempts[0].state is AttemptState.STARTING
    assert waiting.requeue_after == timedelta(seconds=59)


def test_nodes_are_released_only_if_one_is_running_and_a_startup_deadline_is_set() -> None:
    ftjob = started_job(startupDeadlineSeconds=60)
    observation = build_observation(ftjob, unschedulable_pod(ftjob, 0), unschedulable_pod(ftjob, 1))
    ftjob, _ = decide_once(ftjob, observation)
    ftjob, _ = decide_once(ftjob, observation, now=NOW + timedelta(hours=5))
    assert ftjob.status.attempts[0].state is AttemptState.STARTING

    ftjob, one_running = job_with_one_running_node(startupDeadlineSeconds=0)
    ftjob, _ = decide_once(ftjob, one_running, now=NOW + timedelta(hours=5))
    assert ftjob.status.attempts[0].state is AttemptState.STARTING


def test_released_attempts_do_not_count_against_the_restart_budget() -> None:
    ftjob, now = (
        started_job(startupDeadlineSeconds=60, restartPolicy={"maxInfrastructureRestarts": 0, "maxRestarts": 0}),
        NOW,
    )
    for attempt in range(30):
        first = running_pod(ftjob, 0, attempt=attempt)
        first["status"]["containerStatuses"][0]["state"] = {"running": {"startedAt": now.isoformat()}}
        one_running = build_observation(ftjob, first, unschedulable_pod(ftjob, 1, attempt=attempt))
        for _ in range(2):
            ftjob, _ = decide_once(ftjob, one_running, now=now)
            now += timedelta(seconds=60)
        ftjob, _ = decide_once(ftjob, NOTHING, now=now)
        now += timedelta(seconds=300)
    assert ftjob.status.attempt == 30
    assert ftjob.status.completion_time is None


def test_pending_deadline_is_not_reset_by_releases_and_fails_the_job() -> None:
    ftjob, one_running = job_with_one_running_node(startupDeadlineSeconds=60, pendingDeadlineSeconds=400)
    for seconds in (60, 60, 61):
        ftjob, _ = decide_once(
            ftjob,
            one_running if ftjob.status.attempt == 0 and seconds == 60 else NOTHING,
            now=NOW + timedelta(seconds=seconds),
        )
    assert ftjob.status.attempt == 1

    ftjob, waiting = decide_once(ftjob, NOTHING, now=NOW + timedelta(seconds=399))
    assert waiting.requeue_after == timedelta(seconds=1)
    for _ in range(2):
        ftjob, _ = decide_once(ftjob, NOTHING, now=NOW + timedelta(seconds=400))

    assert {condition.type: condition.status for condition in ftjob.status.conditions}["Failed"] == "True"
    assert (ftjob.status.attempts[-1].reason, ftjob.status.attempts[-1].fault) == ("PendingDeadlineExceeded", "user")
    assert "not all nodes ran within pendingDeadlineSeconds (400 s)" in ftjob.status.attempts[-1].message


def test_pending_deadline_restarts_after_a_running_attempt() -> None:
    ftjob = started_job(pendingDeadlineSeconds=400)
    ftjob, _ = decide_with(ftjob, running_pod(ftjob, 0), running_pod(ftjob, 1))
    ftjob, _ = decide_with(ftjob, running_pod(ftjob, 0), running_pod(ftjob, 1), now=NOW + timedelta(hours=1))
    assert ftjob.status.attempts[0].state is AttemptState.RUNNING
    for _ in range(2):
        ftjob, _ = decide_with(
            ftjob,
            finished_pod(ftjob, 0, exit_code=137),
            finished_pod(ftjob, 1, exit_code=137),
            now=NOW + timedelta(hours=1),
        )

    assert ftjob.status.attempts[-1].pending_since == NOW + timedelta(hours=1)
