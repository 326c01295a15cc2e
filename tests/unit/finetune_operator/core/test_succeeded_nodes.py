"""Tests of nodes that succeeded while others run, and whose pods are removed afterwards."""

import json
from datetime import timedelta
from typing import Any

import pytest

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.status import AttemptState
from finetune_operator.core.succeeded_nodes import parse_succeeded
from testing.builders.jobs import NOW, build_observation, decide_once, decide_with, finished_pod, running_pod
from testing.builders.stopping import build_running_job

LATER = NOW + timedelta(seconds=15)


def succeeded_pod(ftjob: FineTuneJob, rank: int) -> dict[str, Any]:
    message = json.dumps({"final": True, "outcome": "succeeded", "time": NOW.timestamp()})
    return finished_pod(ftjob, rank, exit_code=0, message=message)


def record_success(ftjob: FineTuneJob) -> FineTuneJob:
    """Return the job after the success of node 1 was recorded."""
    observation = build_observation(ftjob, running_pod(ftjob, 0), succeeded_pod(ftjob, 1))
    return decide_once(ftjob, observation, now=LATER)[0]


def test_success_of_a_node_is_recorded_if_other_nodes_run_for_longer() -> None:
    ftjob = build_running_job()
    observation = build_observation(ftjob, running_pod(ftjob, 0), succeeded_pod(ftjob, 1))

    unchanged, decision = decide_once(ftjob, observation, now=NOW + timedelta(seconds=4))
    recorded, later_decision = decide_once(unchanged, observation, now=LATER)

    assert (unchanged.status.attempts[-1].succeeded, recorded.status.attempts[-1].succeeded) == ("", "1")
    assert decision.requeue_after == timedelta(seconds=6)
    assert later_decision.requeue_after != timedelta()


def test_removed_pod_of_a_succeeded_node_does_not_end_the_attempt() -> None:
    ftjob = record_success(build_running_job())

    running, _ = decide_with(ftjob, running_pod(ftjob, 0), now=LATER)
    complete, _ = decide_with(running, succeeded_pod(running, 0), now=LATER)

    assert running.status.attempts[-1].state is AttemptState.RUNNING
    assert (complete.status.phase, complete.status.attempts[-1].state) == ("Complete", AttemptState.SUCCEEDED)


def test_failure_of_another_node_is_the_root_cause_after_a_success() -> None:
    ftjob = record_success(build_running_job())
    failed = finished_pod(ftjob, 0, message=json.dumps({"final": True, "outcome": "failed", "errorType": "KeyError"}))

    stopping, _ = decide_with(ftjob, failed, now=LATER)
    ended, _ = decide_with(stopping, failed, now=LATER)

    assert (ended.status.attempts[0].reason, ended.status.attempts[0].node_rank) == ("UserCodeError", 0)


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        pytest.param("", set(), id="empty"),
        pytest.param("0-2,7", {0, 1, 2, 7}, id="ranges"),
        pytest.param("3-99999999999", {3, 4, 5, 6, 7}, id="beyond the number of nodes"),
        pytest.param("-1", set(), id="negative"),
        pytest.param("all", set(), id="no number"),
    ],
)
def test_recorded_ranks_are_bounded_by_the_number_of_nodes(text: str, ranks: set[int]) -> None:
    assert parse_succeeded(text, num_nodes=8) == ranks
