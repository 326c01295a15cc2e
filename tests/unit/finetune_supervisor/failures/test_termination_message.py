import math
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_api.termination import MAX_BYTES, Outcome, parse_termination
from finetune_api.termination import Termination as Contract
from finetune_api.v1alpha1 import status
from finetune_supervisor import contract
from finetune_supervisor.failures.termination_message import Termination, encode, write_termination
from finetune_supervisor.liveness.heartbeat import Heartbeat, Memory, Progress, progress_object

FULL = Termination(
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


def test_the_operator_reads_every_field_that_the_supervisor_writes() -> None:
    read = parse_termination(encode(FULL).decode())

    assert read is not None
    assert {field.name for field in fields(Termination)} == set(Contract.model_fields)
    assert read.progress is not None
    assert (read.progress.step, read.progress.total_steps, read.progress.loss) == (41, 60, 1.5)
    for field in fields(Termination):
        if field.name != "progress":
            assert getattr(read, field.name) == getattr(FULL, field.name), field.name


@pytest.mark.parametrize(
    "outcome", [contract.STARTING, contract.RUNNING, contract.SUCCEEDED, contract.STOPPED, contract.FAILED]
)
def test_the_operator_knows_every_outcome(outcome: str) -> None:
    read = parse_termination(encode(Termination(node_rank=0, attempt=0, outcome=outcome)).decode())

    assert read is not None
    assert read.outcome is Outcome(outcome)


@given(message=st.text(max_size=9000), stack=st.text(max_size=9000))
def test_a_message_always_fits_and_is_always_whole(message: str, stack: str) -> None:
    encoded = encode(Termination(node_rank=0, attempt=0, error_type="X", message=message, stack=stack))

    assert len(encoded) < MAX_BYTES
    read = parse_termination(encoded.decode())
    assert read is not None
    assert read.error_type == "X"


def test_the_stack_loses_its_head_before_the_message_loses_a_letter() -> None:
    read = parse_termination(encode(Termination(0, 0, message="m" * 3000, stack="s" * 3000 + "end")).decode())

    assert read is not None
    assert read.message == "m" * 3000
    assert read.stack.endswith("end")


def test_a_long_message_keeps_its_head() -> None:
    read = parse_termination(encode(Termination(0, 0, message="start" + "m" * 9000, stack="s")).decode())

    assert read is not None
    assert read.message.startswith("start")
    assert read.message.endswith("...")
    assert read.stack == ""


def test_lone_surrogates_do_not_break_it() -> None:
    assert parse_termination(encode(Termination(0, 0, message="\udcff")).decode()) is not None


def test_a_shorter_message_leaves_nothing_of_a_longer_one(tmp_path: Path) -> None:
    path = tmp_path / "termination-log"

    write_termination(path, FULL)
    write_termination(path, Termination(node_rank=0, attempt=0))

    assert path.read_bytes() == encode(Termination(node_rank=0, attempt=0))


def test_progress_is_what_the_status_holds() -> None:
    numbers: dict[str, Any] = {field.name: 1 for field in fields(Progress)}
    sizes: dict[str, Any] = {field.name: 1 for field in fields(Memory)}
    memory = Memory(**{**sizes, "cause": "step 1"})
    words = {"last_checkpoint": "step-00000001", "slow_rank": "rank 1 +20%", "ended": "by itself"}
    progress = Progress(**{**numbers, **words, "memory": memory})
    beat = Heartbeat(rank=0, local_rank=0, pid=1, time=1.25, phase=contract.TRAIN, progress=progress)

    read = status.Progress.model_validate(progress_object(beat))

    assert {field.name for field in fields(Progress)} | {"update_time", "first_step", "first_step_time"} == set(
        status.Progress.model_fields
    )
    assert {field.name for field in fields(Memory)} == set(status.MemoryStatus.model_fields)
    assert read.eta_seconds == 1
    assert read.memory == status.MemoryStatus.model_validate(asdict(memory))
    assert read.update_time is not None
    assert read.update_time.timestamp() == 1.25


def test_numbers_that_json_does_not_have_are_left_out() -> None:
    beat = Heartbeat(
        rank=0, local_rank=0, pid=1, time=0, phase="", progress=Progress(loss=math.nan, grad_norm=math.inf)
    )

    assert {"loss", "gradNorm"}.isdisjoint(progress_object(beat))
