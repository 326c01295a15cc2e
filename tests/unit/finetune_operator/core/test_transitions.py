"""Tests of the transitions that are derived from a status for notifications."""

from typing import Any

import pytest

from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, Condition, Fault, JobStatus
from finetune_operator.core.transitions import TransitionType, list_transitions
from testing.builders.jobs import NOW
from testing.builders.statuses import get_time_after_start


def record(attempt: int, state: AttemptState, **fields: Any) -> AttemptRecord:
    start = get_time_after_start(100 * attempt)
    return AttemptRecord(attempt=attempt, state=state, start_time=start, **fields)


FAILURE: dict[str, Any] = {
    "running_time": get_time_after_start(10),
    "end_time": get_time_after_start(50),
    "reason": "RankKilled",
    "fault": Fault.TRANSIENT,
    "message": "rank 3 was ended by SIGKILL",
    "node_rank": 1,
    "rank": 3,
    "k8s_node": "gpu-7",
    "action": "Restart",
}


@pytest.mark.parametrize(
    ("status", "keys"),
    [
        pytest.param(JobStatus(), [], id="new job"),
        pytest.param(JobStatus(attempts=(record(0, AttemptState.STARTING),)), ["started-0"], id="starting"),
        pytest.param(
            JobStatus(attempts=(record(0, AttemptState.RUNNING, running_time=NOW),)),
            ["started-0", "running-0"],
            id="running",
        ),
        pytest.param(
            JobStatus(attempts=(record(0, AttemptState.STOPPING, running_time=NOW, reason="NodeFailed"),)),
            ["started-0", "running-0"],
            id="stopping is no transition, because its cause is not judged yet",
        ),
        pytest.param(
            JobStatus(attempts=(record(0, AttemptState.FAILED, **FAILURE), record(1, AttemptState.STARTING))),
            ["started-0", "running-0", "restarting-0"],
            id="restarting",
        ),
        pytest.param(
            JobStatus(attempts=(record(0, AttemptState.FAILED, **FAILURE),), completion_time=NOW),
            ["started-0", "running-0", "failed-0"],
            id="failed",
        ),
        pytest.param(
            JobStatus(attempts=(record(0, AttemptState.STOPPED, end_time=NOW),)),
            ["started-0", "suspended-0"],
            id="suspended",
        ),
        pytest.param(
            JobStatus(attempts=(record(0, AttemptState.STOPPED, end_time=NOW), record(1, AttemptState.STARTING))),
            ["started-0", "suspended-0", "resumed-1"],
            id="resumed",
        ),
        pytest.param(
            JobStatus(attempts=(record(4, AttemptState.SUCCEEDED, end_time=NOW),), completion_time=NOW),
            ["completed-4"],
            id="completed, older attempts are not kept",
        ),
    ],
)
def test_a_status_contains_its_transitions_in_order(status: JobStatus, keys: list[str]) -> None:
    assert [transition.key for transition in list_transitions(status)] == keys


def test_a_restart_has_the_cause_of_the_failed_attempt() -> None:
    status = JobStatus(attempts=(record(0, AttemptState.FAILED, **FAILURE), record(1, AttemptState.STARTING)))

    restart = list_transitions(status)[-1]

    assert (restart.type, restart.time, restart.attempt) == (TransitionType.RESTARTING, FAILURE["end_time"], 0)
    assert (restart.reason, restart.fault, restart.message) == (
        "RankKilled",
        "transient",
        "rank 3 was ended by SIGKILL",
    )
    assert (restart.node_rank, restart.rank, restart.k8s_node) == (1, 3, "gpu-7")


def test_a_job_with_an_invalid_spec_fails_without_an_attempt() -> None:
    condition = Condition(
        type="Failed", status="True", last_transition_time=NOW, reason="InvalidSpec", message="spec.sft: set one"
    )

    (failure,) = list_transitions(JobStatus(completion_time=NOW, conditions=(condition,)))

    assert (failure.key, failure.reason, failure.message) == ("failed-none", "InvalidSpec", "spec.sft: set one")


def test_every_transition_explains_itself_in_one_line() -> None:
    stopped = record(1, AttemptState.STOPPED, end_time=NOW, running_time=NOW)
    records = (record(0, AttemptState.FAILED, **FAILURE), stopped, record(2, AttemptState.STARTING))

    transitions = list_transitions(JobStatus(attempts=records))

    assert len(transitions) == 6
    assert all(transition.message and "\n" not in transition.message for transition in transitions)


def test_a_transition_stays_the_same_when_the_job_continues() -> None:
    earlier = JobStatus(attempts=(record(0, AttemptState.FAILED, **FAILURE), record(1, AttemptState.STARTING)))
    updated = record(0, AttemptState.FAILED, **FAILURE, downtime_seconds=9, steps_lost=4)
    later = JobStatus(
        restarts=1, attempts=(updated, record(1, AttemptState.SUCCEEDED, end_time=NOW)), completion_time=NOW
    )

    assert set(list_transitions(earlier)) <= set(list_transitions(later))
