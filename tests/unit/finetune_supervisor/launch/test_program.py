"""What the supervisor starts, and in which environment."""

from dataclasses import replace
from pathlib import Path

from finetune_supervisor.launch.program import trainer_program, with_flight_recorder
from testing.builders.nodes import node


def test_what_collectives_did_last_is_kept_beside_the_logs(tmp_path: Path) -> None:
    here = replace(node(tmp_path), output=tmp_path / "output", attempt=2)

    env = with_flight_recorder({"PATH": "/bin"}, here)

    kept = str(tmp_path / "output/logs/attempt-2/collectives-rank-")
    assert env["PATH"] == "/bin"
    assert env["TORCH_FR_DUMP_TEMP_FILE"] == env["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == kept
    assert env["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert trainer_program(env).environment == env


def test_what_the_user_says_of_the_recorder_stays(tmp_path: Path) -> None:
    here = replace(node(tmp_path), output=tmp_path / "output")

    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        env = with_flight_recorder({name: "0"}, here)
        assert {env.get(each) for each in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")} == {"0", None}


def test_without_an_output_nothing_is_recorded(tmp_path: Path) -> None:
    assert with_flight_recorder({"A": "1"}, replace(node(tmp_path), output=None)) == {"A": "1"}
