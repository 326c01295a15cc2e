"""Tests of the final termination messages of finished nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finetune_supervisor import contract
from finetune_supervisor.failures.rank_failures import RankFailure
from finetune_supervisor.judge import (
    FinishedNode,
    build_failure_message,
    build_stop_message,
    build_success_message,
    get_container_exit_code,
    judge,
)
from finetune_supervisor.messages import TerminationMessage, TrainingProgress
from finetune_supervisor.stop_request import StopRequest
from testing.builders.nodes import node

RUNNING_MESSAGE = TerminationMessage(
    node_rank=1, attempt=1, outcome=contract.RUNNING, phase=contract.TRAIN, progress=TrainingProgress(step=7)
)
DONE, STOPPED, TRAINING = (frozenset({phase}) for phase in (contract.DONE, contract.STOPPED, contract.TRAIN))
NO_STOP = StopRequest(grace_seconds=60)
REQUESTED = replace(NO_STOP, requested_at=1.0)
FORCED = replace(REQUESTED, terminated_at=2.0, reason="stopped by a second signal; no checkpoint was saved")
CAUSE = RankFailure(local_rank=1, error_type="ValueError", message="bad row", time=50.0, stack="Traceback", exit_code=1)
VICTIM = RankFailure(local_rank=0, error_type="DistBackendError", message="NCCL", time=40.0, exit_code=1, victim=True)
HANG = RankFailure(local_rank=0, error_type=contract.HANG, message="rank 2 hangs", time=30.0)
SAVED_REASON = "stopped on request; a checkpoint was saved"
PEERS_ENDED_REASON = "stopped, but other nodes ended before a checkpoint was saved"


def finished(**fields: Any) -> FinishedNode:
    """Build a node of rank 1, which has ranks 2 and 3, that finished at time 100 s."""
    base = FinishedNode(node(Path("/output"), node_rank=1), RUNNING_MESSAGE, 1, 100.0, NO_STOP, phases=TRAINING)
    return replace(base, **fields)


SUCCESSES = [
    pytest.param(finished(exit_code=0, phases=DONE), id="all ranks are done"),
    pytest.param(finished(is_published=True, failures=(CAUSE,)), id="a rank crashed after the result was published"),
    pytest.param(finished(is_published=True, stop_request=FORCED), id="stopped after the result was published"),
    pytest.param(finished(exit_code=-9, is_published=True, hang=HANG), id="a rank hangs on shutdown"),
    pytest.param(finished(exit_code=0, is_command=True), id="a command exits with 0"),
]


@pytest.mark.parametrize("finished_node", SUCCESSES)
def test_node_with_a_complete_result_has_succeeded(finished_node: FinishedNode) -> None:
    assert judge(finished_node) == build_success_message(RUNNING_MESSAGE, now=100.0)


@pytest.mark.parametrize(
    ("finished_node", "reason"),
    [
        pytest.param(finished(exit_code=0, phases=STOPPED, stop_request=REQUESTED), SAVED_REASON, id="saved"),
        pytest.param(finished(exit_code=-15, stop_request=FORCED), FORCED.reason, id="terminated without a checkpoint"),
        pytest.param(
            finished(stop_request=FORCED, failures=(CAUSE,)), FORCED.reason, id="failed while being terminated"
        ),
        pytest.param(finished(stop_request=REQUESTED), PEERS_ENDED_REASON, id="no failure was recorded"),
        pytest.param(
            finished(stop_request=REQUESTED, failures=(VICTIM,)), PEERS_ENDED_REASON, id="only a victim failed"
        ),
        pytest.param(
            finished(exit_code=0, is_command=True, stop_request=REQUESTED),
            "stopped on request",
            id="a command exits with 0",
        ),
        pytest.param(
            finished(is_command=True, stop_request=REQUESTED, failures=(CAUSE,)),
            "stopped on request",
            id="a command fails",
        ),
        pytest.param(finished(is_command=True, stop_request=FORCED), FORCED.reason, id="a command is terminated"),
    ],
)
def test_node_is_stopped_after_a_stop_request(finished_node: FinishedNode, reason: str) -> None:
    assert judge(finished_node) == build_stop_message(RUNNING_MESSAGE, reason, now=100.0)


@pytest.mark.parametrize(
    ("finished_node", "failure"),
    [
        pytest.param(finished(failures=(CAUSE,)), CAUSE, id="a rank failed"),
        pytest.param(finished(failures=(VICTIM, CAUSE)), CAUSE, id="a victim failed first"),
        pytest.param(finished(failures=(VICTIM,)), VICTIM, id="only a victim failed"),
        pytest.param(
            finished(failures=(CAUSE,), stop_request=REQUESTED), CAUSE, id="a rank failed after a stop request"
        ),
        pytest.param(finished(exit_code=-9, hang=HANG, failures=(CAUSE,)), HANG, id="a rank hangs"),
        pytest.param(finished(exit_code=-9, hang=HANG, stop_request=REQUESTED), HANG, id="a rank hangs and is stopped"),
        pytest.param(finished(is_command=True, exit_code=-9, hang=HANG), HANG, id="a command hangs"),
        pytest.param(finished(is_command=True, failures=(CAUSE,)), CAUSE, id="a rank of a command failed"),
    ],
)
def test_first_failure_of_a_rank_is_reported(finished_node: FinishedNode, failure: RankFailure) -> None:
    final_message = judge(finished_node)

    assert (final_message.final, final_message.outcome, final_message.phase) == (True, contract.FAILED, contract.TRAIN)
    assert final_message.progress == RUNNING_MESSAGE.progress
    for name in ("error_type", "message", "stack", "exit_code", "signal", "victim", "local_rank", "time"):
        assert getattr(final_message, name) == getattr(failure, name), name
    assert failure.local_rank is not None
    assert final_message.rank == failure.local_rank + 2


def test_long_stack_is_truncated_at_its_start() -> None:
    final_message = judge(finished(failures=(replace(CAUSE, stack="s" * 5000 + "end"),)))

    assert len(final_message.stack) == 3000
    assert final_message.stack.endswith("end")


def test_launcher_failure_has_no_rank() -> None:
    final_message = judge(finished(failures=(replace(CAUSE, local_rank=None),)))

    assert (final_message.rank, final_message.local_rank) == (None, None)


@pytest.mark.parametrize(
    ("exit_code", "error_type", "message"),
    [
        (0, "RankExited", "the ranks ended without an error and without a result"),
        (3, "LauncherFailed", "the launcher exited with code 3; the end of its output:\nlast line"),
        (-9, "LauncherFailed", "the launcher ended by signal 9; the end of its output:\nlast line"),
    ],
)
def test_launcher_failure_is_reported_if_no_rank_failure_is_known(
    exit_code: int, error_type: str, message: str
) -> None:
    final_message = judge(finished(exit_code=exit_code, output_tail="last line"))

    assert final_message == build_failure_message(RUNNING_MESSAGE, error_type, message, now=100.0)


def test_node_with_done_and_stopped_ranks_has_failed() -> None:
    assert judge(finished(exit_code=0, phases=DONE | STOPPED)).error_type == "RankExited"


def test_exception_of_a_command_is_parsed_from_its_output() -> None:
    traceback = "Traceback (most recent call last):\n  File \"train.py\", line 3, in <module>\nKeyError: 'text'\n"

    final_message = judge(finished(is_command=True, output_tail=f"step 1\n{traceback}"))

    assert (final_message.error_type, final_message.message, final_message.exit_code, final_message.time) == (
        "KeyError",
        "'text'",
        1,
        100.0,
    )


def test_last_line_is_reported_for_a_command_without_an_exception() -> None:
    final_message = judge(finished(is_command=True, exit_code=3, output_tail="loading\nno such option: --lr\n"))

    assert final_message.error_type == "RankExited"
    assert final_message.message == "exited with code 3; its last line: no such option: --lr"
    assert (final_message.exit_code, final_message.stack) == (3, "loading\nno such option: --lr\n")


@pytest.mark.parametrize(
    ("final_message", "exit_code"),
    [
        (build_success_message(RUNNING_MESSAGE, now=1.0), 0),
        (build_stop_message(RUNNING_MESSAGE, SAVED_REASON, now=1.0), 143),
        (build_failure_message(RUNNING_MESSAGE, "DatasetError", "no rows", now=1.0), 2),
        (build_failure_message(RUNNING_MESSAGE, "ValueError", "x", now=1.0), 1),
    ],
)
def test_exit_code_depends_on_the_outcome(final_message: TerminationMessage, exit_code: int) -> None:
    assert get_container_exit_code(final_message) == exit_code
