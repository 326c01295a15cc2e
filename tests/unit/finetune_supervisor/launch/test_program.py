"""Tests of the environment of the trainer program."""

from dataclasses import replace
from pathlib import Path

from finetune_supervisor.launch.program import enable_flight_recorder, plan_trainer_program
from testing.builders.nodes import node


def test_flight_recorder_writes_next_to_the_logs(tmp_path: Path) -> None:
    this_node = replace(node(tmp_path), output=tmp_path / "output", attempt=2)

    env = enable_flight_recorder({"PATH": "/bin"}, this_node)

    dump_prefix = str(tmp_path / "output/logs/attempt-2/collectives-rank-")
    assert env["PATH"] == "/bin"
    assert env["TORCH_FR_DUMP_TEMP_FILE"] == env["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == dump_prefix
    assert env["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert plan_trainer_program(env).environment == env


def test_flight_recorder_variables_of_the_user_take_precedence(tmp_path: Path) -> None:
    this_node = replace(node(tmp_path), output=tmp_path / "output")

    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        env = enable_flight_recorder({name: "0"}, this_node)
        assert {env.get(each) for each in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")} == {"0", None}


def test_flight_recorder_is_disabled_without_an_output(tmp_path: Path) -> None:
    assert enable_flight_recorder({"A": "1"}, replace(node(tmp_path), output=None)) == {"A": "1"}
