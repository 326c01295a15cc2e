"""Tests that find deviations of a run from its expectation and render them on the page."""

from dataclasses import replace
from typing import Any

import pytest

from finetune_api.v1alpha1.reasons import Reason
from testing.faults.__main__ import compute_exit_code
from testing.faults.expectation import Expectation, ExpectedValue, expect_restart
from testing.faults.matrix_page import ClusterSetup, render_page
from testing.faults.outcome import FaultRun, ObservedFailure, find_deviations, parse_status

EXPECTED = Expectation(
    "rank-sigkill", "SIGKILL to rank 3", expect_restart(Reason.RANK_KILLED), node_rank=1, rank=3, max_steps_lost=10
)
KILLED = ObservedFailure("RankKilled", "transient", "Restart", node_rank=1, rank=3)
GOOD = FaultRun(
    fault="rank-sigkill",
    began="2026-01-01T12:00:00+00:00",
    phase="Complete",
    failures=(KILLED,),
    restarts=1,
    counted=1,
    detected_seconds=1.25,
    again_seconds=5.5,
    steps_lost=7,
)
SETUP = ClusterSetup(kubernetes="1.36.3", node_count=2, core_count=2, cgroup_version="version 1")

DEVIATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "another reason": ({"failures": (replace(KILLED, reason="PeerLost"),)}, "observed PeerLost (transient), Restart"),
    "another fault": ({"failures": (replace(KILLED, fault="unknown"),)}, "observed RankKilled (unknown), Restart"),
    "another action": ({"failures": (replace(KILLED, action="Fail"),)}, "observed RankKilled (transient), Fail"),
    "another phase": ({"phase": "Failed"}, "ended Failed, expected Complete"),
    "no phase": ({"phase": ""}, "ended in no phase, expected Complete"),
    "not detected": ({"failures": (), "restarts": 0, "counted": 0}, "observed no failure"),
    "one more restart": ({"failures": (KILLED, KILLED), "restarts": 2}, "2 restarts, expected 1"),
    "not counted": ({"counted": 0}, "0 restarts counted against the budget, expected 1"),
    "wrong node rank": ({"failures": (replace(KILLED, node_rank=0),)}, "blamed node_rank 0, expected 1"),
    "missing rank": ({"failures": (replace(KILLED, rank=None),)}, "blamed rank None, expected 3"),
    "too many steps lost": ({"steps_lost": 11}, "11 steps lost, expected at most 10"),
    "missing steps": ({"steps_missing": 2}, "2 steps were never trained"),
    "unexpectedly avoided Kubernetes node": ({"avoided": ("node1",)}, "avoided node1"),
    "leftovers": ({"leftovers": ("service/x",)}, "left behind: service/x"),
    "timeout of the test harness": ({"trouble": "not training again within 90 s"}, "not training again within 90 s"),
}


def test_run_that_meets_expectation_has_no_deviations() -> None:
    assert find_deviations(EXPECTED, GOOD) == ()
    assert compute_exit_code([EXPECTED], [GOOD]) == 0


@pytest.mark.parametrize("deviation", DEVIATIONS)
def test_deviation_is_listed_on_the_page_and_causes_exit_code_1(deviation: str) -> None:
    fields, message = DEVIATIONS[deviation]
    run = replace(GOOD, **fields)

    assert message in find_deviations(EXPECTED, run)
    assert compute_exit_code([EXPECTED], [GOOD, run]) == 1
    page = render_page([EXPECTED], [GOOD, run], SETUP)
    assert "**1 of 2**" in page
    assert f"- rank-sigkill, {run.began}: " in page
    assert message in page


def test_missing_pending_reason_is_a_deviation() -> None:
    expectation = Expectation("quota", "no pod is allowed", pending_reason=Reason.CREATE_REFUSED)
    run = FaultRun(fault="quota", began="2026-01-01T12:00:00+00:00", phase="Complete")

    assert find_deviations(expectation, run) == ("reported to wait for nothing, expected CreateRefused",)
    assert find_deviations(expectation, replace(run, waited_for=("CreateRefused",))) == ()


MEASURED = Expectation(
    "drain", "a drain", values=(ExpectedValue("replicas", equal_to=2), ExpectedValue("started after, s", at_most=10))
)


@pytest.mark.parametrize(
    ("values", "deviations"),
    [
        pytest.param({"replicas": 2, "started after, s": 10}, (), id="as expected"),
        pytest.param(
            {"replicas": 1, "started after, s": 10.5},
            ("replicas: 2, measured 1", "started after, s: at most 10, measured 10.5"),
            id="wrong",
        ),
        pytest.param({}, ("replicas: not measured", "started after, s: not measured"), id="missing"),
    ],
)
def test_measured_values_are_compared_with_the_expectation(
    values: dict[str, str | float], deviations: tuple[str, ...]
) -> None:
    run = FaultRun(fault="drain", began="2026-01-01T12:00:00+00:00", phase="Complete", values=values)

    assert find_deviations(MEASURED, run) == deviations
    assert FaultRun.from_json(run.to_json()) == run


def test_fault_without_run_is_listed_and_causes_exit_code_1() -> None:
    other_expectation = replace(EXPECTED, name="rank-segfault")

    page = render_page([EXPECTED, other_expectation], [GOOD], SETUP)

    assert page.count("**not run**") == 1
    assert compute_exit_code([EXPECTED, other_expectation], [GOOD]) == 1


def test_run_fields_are_parsed_from_final_status() -> None:
    attempts = [
        {
            "attempt": 0,
            "state": "Failed",
            "reason": "RankKilled",
            "fault": "transient",
            "action": "Restart",
            "nodeRank": 1,
            "rank": 3,
        },
        {"attempt": 1, "state": "Succeeded", "reason": "Completed", "action": "Complete", "avoids": ["node1"]},
    ]
    status = {
        "phase": "Complete",
        "attempts": attempts,
        "restarts": 1,
        "withoutProgress": {"counted": 1, "bestStep": 20},
        "conditions": [{"type": "Finished", "status": "True", "message": "it ended"}],
    }

    fields = parse_status(status)

    assert fields == {
        "phase": "Complete",
        "failures": (KILLED,),
        "restarts": 1,
        "counted": 1,
        "avoided": ("node1",),
        "message": "it ended",
    }
