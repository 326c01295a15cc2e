"""What is kept of nodes while an attempt stops: only ever more, and our own stopping is no cause."""

import json
from datetime import timedelta
from typing import Any

import pytest

from finetune_api.termination import Outcome
from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, Evidence, Progress
from finetune_operator.failures.evidence import first_evidence, more_evidence, steps, with_losses
from finetune_operator.failures.rules import judge
from finetune_operator.observation.pods import NodeObservation, observe_pods
from testing.builders.jobs import NOW, Raw, deleting, ended, job, running

OF = job()
RECORD = AttemptRecord(attempt=0, state=AttemptState.RUNNING, created=True)
DEADLINE = NOW + timedelta(seconds=10)


def words(outcome: Outcome = Outcome.FAILED, **fields: Any) -> str:
    return json.dumps({"final": True, "outcome": outcome, "time": NOW.timestamp(), **fields})


def nodes(*pods: Raw, gone: tuple[Raw, ...] = ()) -> tuple[NodeObservation, ...]:
    return observe_pods(pods, gone)


def disrupted(body: Raw, reason: str) -> Raw:
    conditions = [{"type": "DisruptionTarget", "status": "True", "reason": reason}]
    return {**body, "status": {**body["status"], "conditions": conditions}}


def killed(*, seconds: int) -> Raw:
    """Ended by SIGKILL that long after NOW, with nothing said, while its pod is being deleted."""
    finished = (NOW + timedelta(seconds=seconds)).isoformat()
    return deleting(ended(OF, 0, exit_code=137, finishedAt=finished), deadline=DEADLINE)


def first(*pods: Raw, gone: tuple[Raw, ...] = (), record: AttemptRecord = RECORD) -> tuple[Evidence, ...]:
    return first_evidence(record, nodes(*pods, gone=gone), 2)


def more(known: Raw, now: Raw) -> Evidence:
    """What is known of node 0 after one more look at it."""
    [evidence] = more_evidence(first_evidence(RECORD, nodes(known), 1), nodes(now))
    return evidence


def test_there_is_evidence_of_every_node() -> None:
    assert [evidence.node_rank for evidence in first(running(OF, 0))] == [0, 1]
    assert [evidence.node_rank for evidence in first()] == [0, 1]


def test_there_is_evidence_of_nodes_that_the_spec_no_longer_has() -> None:
    fewer = first_evidence(RECORD, nodes(running(OF, 1)), 1)
    assert [evidence.node_rank for evidence in fewer] == [0, 1]


def test_a_pod_that_was_made_and_is_not_there_was_deleted_by_somebody() -> None:
    assert first(running(OF, 0))[1] == Evidence(node_rank=1, ended=True, deleted=True)


def test_two_replicas_that_see_a_lost_node_at_different_times_do_not_correct_each_other() -> None:
    tainted = disrupted(deleting(running(OF, 0)), "DeletionByTaintManager")
    collected = disrupted(deleting(running(OF, 0)), "DeletionByPodGC")
    known = first_evidence(RECORD, nodes(tainted), 1)

    later = more_evidence(known, nodes(gone=(collected,)))
    assert (later[0].disruption, later[0].ended) == ("DeletionByTaintManager", True)
    assert more_evidence(later, nodes(tainted)) == later


def test_a_pod_that_was_never_made_is_not_the_cause() -> None:
    half_made = RECORD.model_copy(update={"created": False})
    evicted = disrupted(deleting(running(OF, 1)), "EvictionByEvictionAPI")

    verdict = judge(first(evicted, record=half_made))

    assert verdict is not None
    assert (verdict.reason, verdict.evidence and verdict.evidence.node_rank) == ("Preempted", 1)


def test_a_pod_that_was_thought_never_made_and_is_found_after_all_tells_how_it_ended() -> None:
    """Somebody edited its labels before it was recorded; it is found by its name when the attempt is judged."""
    half_made = RECORD.model_copy(update={"created": False})
    known = first(ended(OF, 0, message=words(victim=True)), record=half_made)

    later = more_evidence(known, nodes(ended(OF, 0, message=words(victim=True)), ended(OF, 1, exit_code=137)))

    verdict = judge(later)
    assert verdict is not None
    assert (verdict.evidence and verdict.evidence.node_rank, verdict.victim) == (1, False)


def test_who_deleted_a_pod_that_was_thought_never_made_is_somebody_else() -> None:
    half_made = RECORD.model_copy(update={"created": False})
    victim = ended(OF, 1, message=words(victim=True))
    stopped = deleting(ended(OF, 0, message=words(Outcome.STOPPED)))

    later = more_evidence(first(victim, record=half_made), nodes(victim, gone=(stopped,)))

    verdict = judge(later)
    assert verdict is not None
    assert (verdict.reason, verdict.evidence and verdict.evidence.node_rank) == ("PodDeleted", 0)


@pytest.mark.parametrize(
    ("pods", "gone", "deleted"),
    [
        pytest.param((running(OF, 0),), (), False, id="runs"),
        pytest.param((deleting(running(OF, 0)),), (), True, id="is being deleted"),
        pytest.param((), (running(OF, 0),), True, id="is gone"),
        pytest.param((deleting(ended(OF, 0, message=words())),), (), False, id="failed first"),
        pytest.param((), (ended(OF, 0, exit_code=0, message=words(Outcome.SUCCEEDED)),), False, id="succeeded first"),
        pytest.param((deleting(ended(OF, 0, message=words(Outcome.STOPPED))),), (), True, id="was stopped"),
    ],
)
def test_who_deletes_a_pod_of_an_attempt_that_is_to_go_on_is_somebody_else(
    pods: tuple[Raw, ...], gone: tuple[Raw, ...], deleted: bool
) -> None:
    assert first(*pods, gone=gone)[0].deleted is deleted


def test_a_pod_that_is_out_of_sight_leaves_what_is_known() -> None:
    known = first(ended(OF, 0, message=words()), running(OF, 1))
    assert more_evidence(known, ()) == known


def test_an_end_is_not_unseen() -> None:
    end = ended(OF, 0, message=words(errorType="KeyError"))
    for later in (running(OF, 0), deleting(running(OF, 0)), ended(OF, 0, exit_code=137)):
        assert more(end, later) == first(end)[0]


def test_an_exit_code_is_not_unseen() -> None:
    known = deleting(ended(OF, 0, message=words(Outcome.STOPPED)))
    assert first(known)[0].deleted
    assert more(known, deleting(running(OF, 0))) == first(known)[0]


def test_what_a_deleted_node_says_later_is_added_and_it_stays_deleted() -> None:
    late = more(deleting(running(OF, 0)), deleting(ended(OF, 0, exit_code=143, message=words(Outcome.STOPPED))))
    assert (late.deleted, late.exit_code, late.outcome) == (True, 143, Outcome.STOPPED)


@pytest.mark.parametrize(
    ("now", "outcome"),
    [
        pytest.param(running(OF, 0), "", id="still runs"),
        pytest.param(deleting(running(OF, 0)), Outcome.STOPPED, id="stops"),
        pytest.param(deleting(ended(OF, 0, message=words(Outcome.STOPPED))), Outcome.STOPPED, id="stopped"),
        pytest.param(killed(seconds=10), Outcome.STOPPED, id="killed when its grace was over"),
        pytest.param(killed(seconds=9), "", id="killed before, so not by us"),
        pytest.param(deleting(ended(OF, 0, message=words())), Outcome.FAILED, id="failed before it was stopped"),
        pytest.param(ended(OF, 0, exit_code=137), "", id="ended before it was stopped"),
    ],
)
def test_a_node_that_ends_because_we_stop_it_is_marked(now: Raw, outcome: str) -> None:
    assert more(running(OF, 0), now).outcome == outcome


@pytest.mark.parametrize(
    ("before", "now", "disruption"),
    [
        pytest.param(
            running(OF, 0),
            disrupted(deleting(running(OF, 0)), "EvictionByEvictionAPI"),
            "",
            id="an eviction of what we stop already",
        ),
        pytest.param(
            running(OF, 0),
            disrupted(deleting(running(OF, 0)), "DeletionByTaintManager"),
            "DeletionByTaintManager",
            id="a lost machine is no work of ours",
        ),
        pytest.param(
            disrupted(deleting(running(OF, 0)), "EvictionByEvictionAPI"),
            deleting(running(OF, 0)),
            "EvictionByEvictionAPI",
            id="what was seen is kept",
        ),
        pytest.param(
            deleting(running(OF, 0)),
            disrupted(deleting(running(OF, 0)), "PreemptionByScheduler"),
            "PreemptionByScheduler",
            id="the reason of a deletion that was not ours comes late",
        ),
    ],
)
def test_a_disruption_explains_what_we_did_not_do(before: Raw, now: Raw, disruption: str) -> None:
    assert more(before, now).disruption == disruption


def told_steps(*pods: Raw, record: AttemptRecord = RECORD, polled: int | None = None) -> tuple[int | None, int | None]:
    record = record.model_copy(update=steps(record, nodes(*pods), None if polled is None else Progress(step=polled)))
    return record.first_step, record.last_step


def test_nobody_has_told_a_step_yet() -> None:
    assert told_steps(running(OF, 0)) == (None, None)


def test_the_last_step_is_the_furthest_that_anybody_told() -> None:
    seven = ended(OF, 0, message=words(firstStep=4, progress={"step": 7}))
    known = RECORD.model_copy(update={"first_step": 0, "last_step": 9})
    assert told_steps(seven) == (4, 7)
    assert told_steps(seven, polled=8) == (4, 8)
    assert told_steps(seven, polled=8, record=known) == (0, 9)


def test_the_first_step_is_the_earliest_that_anybody_told() -> None:
    early, late = (ended(OF, rank, message=words(firstStep=step)) for rank, step in ((0, 0), (1, 4)))
    assert told_steps(late, early) == (0, None)


def test_while_it_runs_its_own_progress_tells_where_and_when_it_began() -> None:
    polled = Progress(step=9, first_step=4, first_step_time=NOW)

    found = RECORD.model_copy(update=steps(RECORD, nodes(running(OF, 0)), polled))
    assert (found.first_step, found.first_step_time, found.last_step) == (4, NOW, 9)
    later = Progress(step=12, first_step=4, first_step_time=NOW + timedelta(minutes=1))
    assert steps(found, (), later)["first_step_time"] == NOW


def attempt(number: int, *, state: AttemptState = AttemptState.FAILED, **fields: Any) -> AttemptRecord:
    return AttemptRecord(attempt=number, state=state, **fields)


TRAINED = attempt(
    0,
    first_step=0,
    first_step_time=NOW,
    last_step=37,
    end_time=NOW + timedelta(seconds=75),
    evidence=(
        Evidence(node_rank=0, outcome="stopped", finished_at=NOW + timedelta(seconds=50)),
        Evidence(node_rank=1, outcome="failed", finished_at=NOW + timedelta(seconds=60)),
    ),
)
AGAIN = attempt(1, state=AttemptState.RUNNING, first_step=30, first_step_time=NOW + timedelta(seconds=90))


def test_an_interruption_lasts_from_the_failure_until_training_goes_on() -> None:
    (before,) = with_losses((TRAINED,), AGAIN)
    assert (before.downtime_seconds, before.steps_lost) == (30, 7)
    assert with_losses((before,), AGAIN.model_copy(update={"first_step_time": NOW + timedelta(hours=1)})) == (before,)


def test_attempts_that_never_trained_prolong_the_interruption() -> None:
    never = attempt(1, end_time=NOW + timedelta(seconds=80))
    before, between = with_losses((TRAINED, never), AGAIN.model_copy(update={"attempt": 2}))
    assert (before.downtime_seconds, before.steps_lost) == (30, 7)
    assert between == never


@pytest.mark.parametrize(
    ("ended", "record"),
    [
        pytest.param(TRAINED, AGAIN.model_copy(update={"first_step_time": None}), id="not yet"),
        pytest.param(TRAINED.model_copy(update={"state": AttemptState.STOPPED}), AGAIN, id="suspended"),
        pytest.param(TRAINED.model_copy(update={"first_step_time": None}), AGAIN, id="it had not trained"),
    ],
)
def test_other_pauses_are_no_interruption(ended: AttemptRecord, record: AttemptRecord) -> None:
    assert with_losses((ended,), record) == (ended,)


def test_a_program_that_does_not_say_where_it_went_on_lost_nobody_knows_how_much() -> None:
    (before,) = with_losses((TRAINED,), AGAIN.model_copy(update={"first_step": None}))
    assert (before.downtime_seconds, before.steps_lost) == (30, None)


def test_evidence_without_a_time_leaves_the_time_of_the_decision() -> None:
    (before,) = with_losses((TRAINED.model_copy(update={"evidence": ()}),), AGAIN)
    assert before.downtime_seconds == 15
