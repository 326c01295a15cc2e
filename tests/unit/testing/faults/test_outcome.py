"""A run that is not as expected is told to be wrong, whatever it is that is wrong."""

from dataclasses import replace
from typing import Any

import pytest

from finetune_api.v1alpha1.reasons import Reason
from testing.faults.__main__ import exit_code
from testing.faults.expectation import Expectation, restarted
from testing.faults.matrix_page import Setup, render_page, spread
from testing.faults.outcome import Run, SeenFailure, deviations, read_status

EXPECTED = Expectation(
    "rank-sigkill", "SIGKILL to rank 3", restarted(Reason.RANK_KILLED), node_rank=1, rank=3, steps_lost=10
)
KILLED = SeenFailure("RankKilled", "transient", "Restart", node_rank=1, rank=3)
GOOD = Run(
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
SETUP = Setup(kubernetes="1.36.3", nodes=2, cores=2, cgroups="version 1")

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another reason": ({"failures": (replace(KILLED, reason="PeerLost"),)}, "saw PeerLost (transient), Restart"),
    "another fault": ({"failures": (replace(KILLED, fault="unknown"),)}, "saw RankKilled (unknown), Restart"),
    "another action": ({"failures": (replace(KILLED, action="Fail"),)}, "saw RankKilled (transient), Fail"),
    "another end": ({"phase": "Failed"}, "ended Failed, expected Complete"),
    "no end": ({"phase": ""}, "ended nowhere, expected Complete"),
    "nobody noticed": ({"failures": (), "restarts": 0, "counted": 0}, "saw no failure"),
    "once more": ({"failures": (KILLED, KILLED), "restarts": 2}, "2 restarts, expected 1"),
    "not counted": ({"counted": 0}, "0 restarts counted against the budget, expected 1"),
    "another node": ({"failures": (replace(KILLED, node_rank=0),)}, "blamed node_rank 0, expected 1"),
    "no rank": ({"failures": (replace(KILLED, rank=None),)}, "blamed rank None, expected 3"),
    "too much lost": ({"steps_lost": 11}, "11 steps lost, expected at most 10"),
    "a gap": ({"steps_missing": 2}, "2 steps were never trained"),
    "a machine in disgrace": ({"avoided": ("node1",)}, "kept away from node1"),
    "leftovers": ({"leftovers": ("service/x",)}, "left behind: service/x"),
    "waited in vain": ({"trouble": "not training again within 90 s"}, "not training again within 90 s"),
}


def test_a_run_as_expected_deviates_in_nothing() -> None:
    assert deviations(EXPECTED, GOOD) == ()
    assert exit_code([EXPECTED], [GOOD]) == 0


@pytest.mark.parametrize("case", WRONG)
def test_whatever_is_wrong_is_named_and_marked_and_fails_the_matrix(case: str) -> None:
    fields, words = WRONG[case]
    run = replace(GOOD, **fields)

    assert words in deviations(EXPECTED, run)
    assert exit_code([EXPECTED], [GOOD, run]) == 1
    page = render_page([EXPECTED], [GOOD, run], SETUP)
    assert "**1 of 2**" in page
    assert f"- rank-sigkill, {run.began}: " in page
    assert words in page


def test_a_wait_that_is_not_told_is_wrong() -> None:
    expected = Expectation("quota", "no pod is allowed", waits_for=Reason.CREATE_REFUSED)
    run = Run(fault="quota", began="2026-01-01T12:00:00+00:00", phase="Complete")

    assert deviations(expected, run) == ("said to wait for nothing, expected CreateRefused",)
    assert deviations(expected, replace(run, waited_for=("CreateRefused",))) == ()


def test_a_fault_without_a_run_is_shown_and_fails_the_matrix() -> None:
    other = replace(EXPECTED, name="rank-segfault")

    page = render_page([EXPECTED, other], [GOOD], SETUP)

    assert page.count("**not run**") == 1
    assert exit_code([EXPECTED, other], [GOOD]) == 1


def test_the_table_shows_medians_and_where_runs_differ() -> None:
    slower = replace(GOOD, detected_seconds=2.0, again_seconds=None)

    page = render_page([EXPECTED], [GOOD, slower, GOOD], SETUP)

    (row,) = (line for line in page.splitlines() if line.startswith("| `rank-sigkill`"))
    assert [cell.strip() for cell in row.strip("|").split(" | ")] == [
        "`rank-sigkill`: SIGKILL to rank 3",
        "RankKilled (transient), Restart; Complete",
        "RankKilled (transient), Restart; Complete",
        "1.2 (1.2 to 2.0)",
        "5.5",
        "7",
        "3 of 3",
    ]
    assert "3 runs of 1 faults; 0 not as expected" in page
    assert "one at a time" in page
    assert "It was busy." in render_page([EXPECTED], [GOOD], replace(SETUP, note="It was busy."))
    assert "up to 3 at a time" in render_page([EXPECTED], [GOOD, replace(GOOD, at_once=3)], SETUP)
    assert spread([None]) == ""


def test_a_run_is_kept_as_a_line() -> None:
    assert Run.from_json(GOOD.to_json()) == GOOD


def test_the_status_is_read_at_its_end() -> None:
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

    read = read_status(status)

    assert read == {
        "phase": "Complete",
        "failures": (KILLED,),
        "restarts": 1,
        "counted": 1,
        "avoided": ("node1",),
        "message": "it ended",
    }
