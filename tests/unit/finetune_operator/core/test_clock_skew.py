"""The clock of the operator's machine was wrong and is right again: what it wrote keeps no job waiting."""

from datetime import timedelta

from finetune_api.v1alpha1.status import AttemptRecord, AttemptState
from finetune_operator.core.actions import Create
from finetune_operator.core.pending import PULL_PATIENCE
from finetune_operator.failures.evidence import with_losses
from finetune_operator.observation.pods import Observation, Refusal
from testing.builders.jobs import NOW, ended, job, pod, running, seen, step

NOTHING = Observation(fresh=True)
AHEAD = NOW + timedelta(hours=5)
BEHIND = NOW - timedelta(hours=5)
MINUTE = timedelta(minutes=1)


def test_a_delay_that_a_clock_named_that_was_ahead_is_none() -> None:
    of, _ = step(job(restartPolicy={"backoffSeconds": 30}), NOTHING)
    for attempt in range(2):  # of which the first restart is immediate
        failed = seen(of, ended(of, 0, attempt=attempt, exit_code=137), running(of, 1, attempt=attempt))
        for observation in (failed, NOTHING):
            of, _ = step(of, observation, now=AHEAD)
    record = of.status.attempts[-1]
    assert record.not_before is not None
    assert record.not_before > AHEAD

    assert not any(isinstance(action, Create) for action in step(of, NOTHING, now=AHEAD)[1].actions)
    assert any(isinstance(action, Create) for action in step(of, NOTHING, now=NOW)[1].actions)


def test_what_is_waited_for_since_a_time_to_come_is_waited_for_since_now() -> None:
    refused = Observation(fresh=True, refusals=(Refusal("Pod", "bert-0-0", 403, "exceeded quota"),))
    of, _ = step(step(job(), NOTHING)[0], refused, now=AHEAD)
    assert of.status.waiting is not None
    assert of.status.waiting.since == AHEAD

    of, _ = step(of, refused)
    assert of.status.waiting is not None
    assert of.status.waiting.since == NOW


def test_what_a_slow_clock_said_is_waited_for_costs_no_patience() -> None:
    of, _ = step(job(), NOTHING, now=BEHIND)
    state = {"waiting": {"reason": "ErrImagePull", "message": "not found"}}
    placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": NOW.isoformat()}
    stuck = [
        pod(of, rank, conditions=[placed], containerStatuses=[{"name": "trainer", "state": state}]) for rank in (0, 1)
    ]
    of, slow = step(of, seen(of, *stuck), now=BEHIND)
    assert slow.requeue_after == PULL_PATIENCE

    of, right = step(of, seen(of, *stuck), now=NOW + MINUTE)
    assert (of.status.attempts[0].state, right.requeue_after) == (AttemptState.STARTING, PULL_PATIENCE - MINUTE)
    of, _ = step(of, seen(of, *stuck), now=NOW + PULL_PATIENCE)
    assert of.status.attempts[0].state is AttemptState.STOPPING


def test_a_pause_that_began_in_time_to_come_takes_nothing_from_the_deadline() -> None:
    of, _ = step(job(), NOTHING)
    asked = of.model_copy(update={"spec": of.spec.model_copy(update={"suspend": True})})
    for _ in range(2):
        asked, _ = step(asked, NOTHING, now=AHEAD)
    assert asked.status.suspend_time == AHEAD

    resumed, _ = step(asked.model_copy(update={"spec": of.spec}), NOTHING)
    assert (resumed.status.attempt, resumed.status.suspended_seconds) == (1, 0)


def test_an_interruption_is_never_shorter_than_nothing() -> None:
    first = AttemptRecord(attempt=0, state=AttemptState.FAILED, first_step_time=NOW, end_time=AHEAD, last_step=3)
    again = AttemptRecord(attempt=1, state=AttemptState.RUNNING, first_step=3, first_step_time=NOW)
    assert with_losses((first,), again)[0].downtime_seconds == 0
