"""Nodes that do not all start: what is waited for how long, what is released, and when the job fails."""

import json
from datetime import timedelta
from typing import Any

import pytest

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.status import AttemptState
from finetune_operator.core.actions import Create, DeletePod
from finetune_operator.observation.pods import Observation, Refusal
from testing.builders.jobs import NOW, Raw, ended, job, pod, running, seen, step

NOTHING = Observation(fresh=True)


def begun(**fields: Any) -> FineTuneJob:
    """A job whose attempt 0 was decided."""
    return step(job(**fields), NOTHING)[0]


def unplaced(of: FineTuneJob, node_rank: int, *, attempt: int = 0) -> Raw:
    no_room = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes fit"}
    body = pod(of, node_rank, attempt=attempt, conditions=[no_room])
    del body["spec"]["nodeName"]
    return body


def half_started(**fields: Any) -> tuple[FineTuneJob, Observation]:
    """Node 0 runs since NOW, and there is no room for node 1."""
    of = begun(**fields)
    half = seen(of, running(of, 0), unplaced(of, 1))
    return step(of, half)[0], half


QUOTA = Refusal("Pod", "bert-0-1", 403, "exceeded quota: gpus")
LEFT = Refusal("Pod", "bert-0-1", 409, "Pod bert-0-1 of a deleted job of the same name is still there", leaving=True)


@pytest.mark.parametrize("refusal", [QUOTA, LEFT], ids=["by a quota", "by a name that will be free"])
def test_nodes_that_wait_for_others_that_are_refused_are_released_too(refusal: Refusal) -> None:
    of = begun(startupDeadlineSeconds=60)
    half = seen(of, running(of, 0), refusals=(refusal,))
    of, _ = step(of, half)
    assert step(of, half, now=NOW + timedelta(seconds=50))[1].requeue_after == timedelta(seconds=10)
    for _ in range(2):
        of, _ = step(of, half, now=NOW + timedelta(seconds=60))
    of, _ = step(of, NOTHING, now=NOW + timedelta(seconds=60))

    assert [record.reason for record in of.status.attempts] == ["GangIncomplete", ""]
    assert refusal.message in of.status.attempts[0].message
    assert of.status.without_progress.infrastructure == 0


@pytest.mark.parametrize("refusal", [QUOTA, LEFT], ids=["by a quota", "by a name that will be free"])
def test_operators_that_come_and_go_do_not_make_nodes_wait_for_longer(refusal: Refusal) -> None:
    """Only who tried knows what was refused; the status keeps since when."""
    of = begun(startupDeadlineSeconds=60)
    half = seen(of, running(of, 0), refusals=(refusal,))
    of, _ = step(of, half)
    of, tried = step(of, seen(of, running(of, 0)), now=NOW + timedelta(seconds=59))
    assert any(isinstance(action, Create) for action in tried.actions)
    of, _ = step(of, half, now=NOW + timedelta(seconds=60))

    assert of.status.attempts[0].state is AttemptState.STOPPING


def test_what_was_refused_is_not_waited_for_once_it_is_made() -> None:
    of = begun()
    of, _ = step(of, seen(of, running(of, 0), refusals=(QUOTA,)))
    of, _ = step(of, seen(of, running(of, 0), pod(of, 1)))

    assert of.status.waiting is None


@pytest.mark.parametrize("refusal", [QUOTA, LEFT], ids=["by a quota", "by a name that will be free"])
def test_a_node_that_gave_up_on_one_that_was_refused_has_not_failed(refusal: Refusal) -> None:
    of = begun(restartPolicy={"maxRestarts": 0})
    of, _ = step(of, seen(of, gave_up(of, 0), refusals=(refusal,)))
    of, _ = step(of, NOTHING)

    assert [record.reason for record in of.status.attempts] == ["GangIncomplete", ""]


@pytest.mark.parametrize(("waited", "pause"), [(0, 1), (1, 1), (4, 4), (15, 15), (3600, 15)])
def test_what_was_refused_is_tried_again_ever_later(waited: int, pause: int) -> None:
    of = begun()
    refused = Observation(fresh=True, refusals=(QUOTA,))
    of, _ = step(of, refused)
    assert step(of, refused, now=NOW + timedelta(seconds=waited))[1].requeue_after == timedelta(seconds=pause)


def test_nodes_whose_clocks_are_ahead_of_ours_are_released_in_time() -> None:
    now = NOW - timedelta(hours=5)
    of = step(job(startupDeadlineSeconds=60), NOTHING, now=now)[0]
    half = seen(of, running(of, 0), unplaced(of, 1))
    of, _ = step(of, half, now=now)
    of, waiting = step(of, half, now=now)
    assert waiting.requeue_after == timedelta(seconds=60)

    of, _ = step(of, half, now=now + timedelta(seconds=60))
    assert of.status.attempts[0].state is AttemptState.STOPPING


def test_nodes_that_wait_for_others_are_released_and_tried_again_later() -> None:
    of, half = half_started(startupDeadlineSeconds=60)
    of, waiting = step(of, half, now=NOW + timedelta(seconds=59))
    assert waiting.requeue_after == timedelta(seconds=1)
    assert of.status.attempts[0].state is AttemptState.STARTING

    late = NOW + timedelta(seconds=60)
    of, _ = step(of, half, now=late)
    _, stopping = step(of, half, now=late)
    assert {action.name for action in stopping.actions if isinstance(action, DeletePod)} == {"bert-0-0", "bert-0-1"}
    of, _ = step(of, NOTHING, now=late)

    released, again = of.status.attempts
    assert (released.reason, of.status.restarts) == ("GangIncomplete", 1)
    assert "1 of 2 pods cannot be placed: 0/3 nodes fit" in released.message
    assert again.not_before == late + timedelta(seconds=300)
    assert of.status.without_progress.infrastructure == 0


def gave_up(of: FineTuneJob, node_rank: int, **said: Any) -> Raw:
    why = {"errorType": "RendezvousTimeoutError", "message": "node ranks 1 of 2 did not come within 120s", **said}
    return ended(of, node_rank, message=json.dumps({"final": True, "outcome": "failed", **why}))


def test_a_node_that_gave_up_on_one_without_room_has_not_failed() -> None:
    """A program of the user's own may wait for its peers for less than startupDeadlineSeconds."""
    of, _ = half_started(restartPolicy={"maxRestarts": 0})
    of, _ = step(of, seen(of, gave_up(of, 0), unplaced(of, 1)))
    of, _ = step(of, NOTHING)

    released, again = of.status.attempts
    assert (released.reason, again.state) == ("GangIncomplete", AttemptState.STARTING)
    assert "gave up waiting for others: 1 of 2 pods cannot be placed: 0/3 nodes fit" in released.message
    assert (of.status.without_progress.counted, again.not_before) == (0, NOW + timedelta(seconds=300))


def test_a_node_that_failed_by_itself_has_failed_whoever_else_has_no_room() -> None:
    of, _ = half_started()
    failed = gave_up(of, 0, errorType="DatasetError", message="row 3 has no messages")
    of, _ = step(of, seen(of, failed, unplaced(of, 1)))
    of, _ = step(of, NOTHING)

    assert of.status.attempts[-1].reason == "DatasetError"


def test_nodes_that_did_not_find_each_other_have_failed_if_all_had_room() -> None:
    of, _ = half_started()
    of, _ = step(of, seen(of, gave_up(of, 0), running(of, 1)))
    of, _ = step(of, NOTHING)

    assert of.status.attempts[0].reason == "RendezvousTimeout"


def test_what_ran_last_begins_the_time_that_machines_idle() -> None:
    of = begun(startupDeadlineSeconds=60)
    of, _ = step(of, seen(of, unplaced(of, 0), unplaced(of, 1)))
    first = running(of, 0)
    first["status"]["containerStatuses"][0]["state"]["running"]["startedAt"] = (NOW + timedelta(hours=1)).isoformat()
    half = seen(of, first, unplaced(of, 1))

    of, waiting = step(of, half, now=NOW + timedelta(hours=1, seconds=1))

    assert of.status.attempts[0].state is AttemptState.STARTING
    assert waiting.requeue_after == timedelta(seconds=59)


def test_nothing_is_released_while_no_node_runs_or_if_it_is_not_wanted() -> None:
    of = begun(startupDeadlineSeconds=60)
    none = seen(of, unplaced(of, 0), unplaced(of, 1))
    of, _ = step(of, none)
    of, _ = step(of, none, now=NOW + timedelta(hours=5))
    assert of.status.attempts[0].state is AttemptState.STARTING

    of, half = half_started(startupDeadlineSeconds=0)
    of, _ = step(of, half, now=NOW + timedelta(hours=5))
    assert of.status.attempts[0].state is AttemptState.STARTING


def test_releases_never_use_up_the_restarts() -> None:
    of, now = begun(startupDeadlineSeconds=60, restartPolicy={"maxInfrastructureRestarts": 0, "maxRestarts": 0}), NOW
    for attempt in range(30):
        first = running(of, 0, attempt=attempt)
        first["status"]["containerStatuses"][0]["state"] = {"running": {"startedAt": now.isoformat()}}
        half = seen(of, first, unplaced(of, 1, attempt=attempt))
        for _ in range(2):
            of, _ = step(of, half, now=now)
            now += timedelta(seconds=60)
        of, _ = step(of, NOTHING, now=now)
        now += timedelta(seconds=300)
    assert of.status.attempt == 30
    assert of.status.completion_time is None


def test_the_pending_deadline_counts_over_releases_and_ends_the_job() -> None:
    of, half = half_started(startupDeadlineSeconds=60, pendingDeadlineSeconds=400)
    for late in (60, 60, 61):
        of, _ = step(of, half if of.status.attempt == 0 and late == 60 else NOTHING, now=NOW + timedelta(seconds=late))
    assert of.status.attempt == 1

    of, waiting = step(of, NOTHING, now=NOW + timedelta(seconds=399))
    assert waiting.requeue_after == timedelta(seconds=1)
    for _ in range(2):
        of, _ = step(of, NOTHING, now=NOW + timedelta(seconds=400))

    assert {condition.type: condition.status for condition in of.status.conditions}["Failed"] == "True"
    assert (of.status.attempts[-1].reason, of.status.attempts[-1].fault) == ("PendingDeadlineExceeded", "user")
    assert "not all nodes ran within pendingDeadlineSeconds (400 s)" in of.status.attempts[-1].message


def test_the_pending_deadline_does_not_count_what_ran() -> None:
    of = begun(pendingDeadlineSeconds=400)
    of, _ = step(of, seen(of, running(of, 0), running(of, 1)))
    of, _ = step(of, seen(of, running(of, 0), running(of, 1)), now=NOW + timedelta(hours=1))
    assert of.status.attempts[0].state is AttemptState.RUNNING
    for _ in range(2):
        of, _ = step(
            of, seen(of, ended(of, 0, exit_code=137), ended(of, 1, exit_code=137)), now=NOW + timedelta(hours=1)
        )

    assert of.status.attempts[-1].pending_since == NOW + timedelta(hours=1)
