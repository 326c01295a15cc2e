"""Encoding of the termination message, and its agreement with the models of the operator."""

import math
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_api.termination import Outcome, Termination, parse_termination
from finetune_api.v1alpha1 import status
from finetune_supervisor import contract
from finetune_supervisor.failures.termination_message import TerminationMessage, encode_termination, write_termination
from finetune_supervisor.liveness.heartbeat import Heartbeat, PeakMemory, TrainingProgress, to_status_progress

FULL = TerminationMessage(
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
    progress={"step": 41, "totalSteps": 60, "loss": 1.5, "updateTime": "2026-11-21T10:27:28.003Z"},
    peak_memory_bytes=541253632,
)


def test_the_operator_parses_every_field_of_the_supervisor() -> None:
    parsed = parse_termination(encode_termination(FULL).decode())

    assert parsed is not None
    assert {field.name for field in fields(TerminationMessage)} == set(Termination.model_fields)
    assert parsed.progress is not None
    assert (parsed.progress.step, parsed.progress.total_steps, parsed.progress.loss) == (41, 60, 1.5)
    for field in fields(TerminationMessage):
        if field.name != "progress":
            assert getattr(parsed, field.name) == getattr(FULL, field.name), field.name


@pytest.mark.parametrize(
    "outcome", [contract.STARTING, contract.RUNNING, contract.SUCCEEDED, contract.STOPPED, contract.FAILED]
)
def test_the_operator_parses_every_outcome(outcome: str) -> None:
    parsed = parse_termination(encode_termination(TerminationMessage(node_rank=0, attempt=0, outcome=outcome)).decode())

    assert parsed is not None
    assert parsed.outcome is Outcome(outcome)


@given(message=st.text(max_size=9000), stack=st.text(max_size=9000))
def test_an_encoded_message_always_fits_and_parses(message: str, stack: str) -> None:
    encoded = encode_termination(
        TerminationMessage(node_rank=0, attempt=0, error_type="X", message=message, stack=stack)
    )

    assert len(encoded) < contract.MAX_TERMINATION_BYTES
    parsed = parse_termination(encoded.decode())
    assert parsed is not None
    assert parsed.error_type == "X"


def test_the_stack_is_shortened_before_the_message() -> None:
    parsed = parse_termination(
        encode_termination(TerminationMessage(0, 0, message="m" * 3000, stack="s" * 3000 + "end")).decode()
    )

    assert parsed is not None
    assert parsed.message == "m" * 3000
    assert parsed.stack.endswith("end")


def test_a_long_message_is_shortened_from_its_end() -> None:
    parsed = parse_termination(
        encode_termination(TerminationMessage(0, 0, message="start" + "m" * 9000, stack="s")).decode()
    )

    assert parsed is not None
    assert parsed.message.startswith("start")
    assert parsed.message.endswith("...")
    assert parsed.stack == ""


def test_lone_surrogates_are_encoded() -> None:
    assert parse_termination(encode_termination(TerminationMessage(0, 0, message="\udcff")).decode()) is not None


def test_a_shorter_message_replaces_a_longer_one_completely(tmp_path: Path) -> None:
    path = tmp_path / "termination-log"

    write_termination(path, FULL)
    write_termination(path, TerminationMessage(node_rank=0, attempt=0))

    assert path.read_bytes() == encode_termination(TerminationMessage(node_rank=0, attempt=0))


def test_the_progress_has_the_fields_of_the_status() -> None:
    numbers: dict[str, Any] = {field.name: 1 for field in fields(TrainingProgress)}
    sizes: dict[str, Any] = {field.name: 1 for field in fields(PeakMemory)}
    memory = PeakMemory(**{**sizes, "cause": "step 1"})
    texts = {"last_checkpoint": "step-00000001", "slow_rank": "rank 1 +20%", "ended": "by itself"}
    progress = TrainingProgress(**{**numbers, **texts, "memory": memory})
    beat = Heartbeat(rank=0, local_rank=0, pid=1, time=1.25, phase=contract.TRAIN, progress=progress)

    parsed = status.Progress.model_validate(to_status_progress(beat))

    assert {field.name for field in fields(TrainingProgress)} | {"update_time", "first_step", "first_step_time"} == set(
        status.Progress.model_fields
    )
    assert {field.name for field in fields(PeakMemory)} == set(status.MemoryStatus.model_fields)
    assert parsed.eta_seconds == 1
    assert parsed.memory == status.MemoryStatus.model_validate(asdict(memory))
    assert parsed.update_time is not None
    assert parsed.update_time.timestamp() == 1.25


def test_nan_and_infinity_are_omitted() -> None:
    beat = Heartbeat(
        rank=0, local_rank=0, pid=1, time=0, phase="", progress=TrainingProgress(loss=math.nan, grad_norm=math.inf)
    )

    assert {"loss", "gradNorm"}.isdisjoint(to_status_progress(beat))
