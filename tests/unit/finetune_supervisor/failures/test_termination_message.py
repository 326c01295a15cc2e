"""Tests of encoding termination messages and parsing them in the operator."""

from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_api.termination import Outcome, Termination, parse_termination
from finetune_supervisor import contract
from finetune_supervisor.failures.termination_message import encode_termination, write_termination
from finetune_supervisor.messages import PeakMemory, TerminationMessage, TrainingProgress

COMPLETE_MESSAGE = TerminationMessage(
    node_rank=1,
    attempt=2,
    final=True,
    outcome=contract.FAILED,
    phase=contract.TRAIN,
    rank=3,
    local_rank=1,
    error_type="DatasetError",
    message='"quoted" – and more',
    stack="Traceback\n  …",
    exit_code=-9,
    signal=9,
    victim=True,
    time=1795256849.816,
    first_step=20,
    progress=TrainingProgress(
        step=41,
        total_steps=60,
        loss=1.5,
        memory=PeakMemory(forecast=9, cause="step 1"),
        update_time=datetime(2026, 11, 21, 10, 27, 28, 3000, tzinfo=UTC),
    ),
    peak_memory_bytes=541253632,
)


def send(message: TerminationMessage) -> Termination:
    """Return the message as the operator parses it."""
    parsed = parse_termination(encode_termination(message).decode())
    assert parsed is not None
    return parsed


def test_operator_parses_every_field_written_by_the_supervisor() -> None:
    parsed = send(COMPLETE_MESSAGE)

    assert parsed.progress is not None
    for message, expected in ((parsed, COMPLETE_MESSAGE), (parsed.progress, COMPLETE_MESSAGE.progress)):
        for field in fields(message):
            if field.name != "progress":
                assert getattr(message, field.name) == getattr(expected, field.name), field.name


@pytest.mark.parametrize(
    "outcome", [contract.STARTING, contract.RUNNING, contract.SUCCEEDED, contract.STOPPED, contract.FAILED]
)
def test_operator_parses_every_outcome(outcome: str) -> None:
    assert send(TerminationMessage(node_rank=0, attempt=0, outcome=outcome)).outcome is Outcome(outcome)


@given(message=st.text(max_size=9000), stack=st.text(max_size=9000))
def test_encoded_message_is_valid_and_below_the_size_limit(message: str, stack: str) -> None:
    termination = TerminationMessage(node_rank=0, attempt=0, error_type="X", message=message, stack=stack)

    assert len(encode_termination(termination)) < contract.MAX_TERMINATION_BYTES
    assert send(termination).error_type == "X"


def test_stack_is_truncated_before_the_message() -> None:
    parsed = send(TerminationMessage(0, 0, message="m" * 3000, stack="s" * 3000 + "end"))

    assert parsed.message == "m" * 3000
    assert parsed.stack.endswith("end")


def test_long_message_is_truncated_at_its_end() -> None:
    parsed = send(TerminationMessage(0, 0, message="start" + "m" * 9000, stack="s"))

    assert parsed.message.startswith("start")
    assert parsed.message.endswith("...")
    assert parsed.stack == ""


def test_lone_surrogates_are_encoded() -> None:
    send(TerminationMessage(0, 0, message="\udcff"))


def test_shorter_message_replaces_a_longer_one_completely(tmp_path: Path) -> None:
    path = tmp_path / "termination-log"

    write_termination(path, COMPLETE_MESSAGE)
    write_termination(path, TerminationMessage(node_rank=0, attempt=0))

    assert path.read_bytes() == encode_termination(TerminationMessage(node_rank=0, attempt=0))
