"""Tests of the program that a node starts for spec.command."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from finetune_supervisor.launch.user_command import (
    InvalidCommand,
    UserCommand,
    expand_variables,
    plan_program,
    read_command,
)
from testing.builders.nodes import node

ENV = {"PATH": "/usr/bin:/bin", "FINETUNE_OUTPUT": "/output/default/bert", "EMPTY": ""}


def command(**fields: Any) -> UserCommand:
    return UserCommand(**{"script": None, "args": (), "exec": (), "working_dir": None, **fields})


@pytest.mark.parametrize(
    ("argument", "expanded"),
    [
        pytest.param("--out=$(FINETUNE_OUTPUT)/x", "--out=/output/default/bert/x", id="variable"),
        pytest.param("$(EMPTY)", "", id="empty variable"),
        pytest.param("$(UNKNOWN)", "$(UNKNOWN)", id="unknown variable"),
        pytest.param("$$(FINETUNE_OUTPUT)", "$(FINETUNE_OUTPUT)", id="escaped"),
        pytest.param("$HOME ${HOME} a b", "$HOME ${HOME} a b", id="shell syntax"),
    ],
)
def test_variables_are_expanded_as_in_kubernetes(argument: str, expanded: str) -> None:
    assert expand_variables(argument, ENV) == expanded


def test_script_is_run_by_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    user_command = command(script="train.py", args=("--out", "$(FINETUNE_OUTPUT)"), working_dir=str(tmp_path))

    program = plan_program(user_command, node(tmp_path, node_rank=1), ENV)

    assert program.argv[-4:] == ("ranks", "train.py", "--out", "/output/default/bert")
    assert (program.working_dir, program.signals_process_group, program.has_own_rendezvous) == (tmp_path, False, True)


def test_torchrun_of_another_python_is_used_if_this_python_has_no_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun reads the number of nodes and ranks and the master address from the environment."""
    (tmp_path / "train.py").touch()
    torchrun = tmp_path / "torchrun"
    torchrun.touch(mode=0o755)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)

    user_command = command(script="train.py", working_dir=str(tmp_path))
    program = plan_program(user_command, node(tmp_path), {**ENV, "PATH": str(tmp_path)})

    logs = f"--log_dir={tmp_path / 'torchrun'}"
    assert program.argv[-5:] == ("exec", str(torchrun), "--max_restarts=0", logs, "train.py")
    assert not program.has_own_rendezvous


def test_exec_command_is_unchanged_and_signals_are_sent_to_its_process_group(tmp_path: Path) -> None:
    program = plan_program(command(exec=("sh", "-c", "echo $(EMPTY)")), node(tmp_path), ENV)

    assert program.argv[-3:][1:] == ("-c", "echo ")
    assert program.argv[-3].endswith("/sh")
    assert (program.signals_process_group, program.has_own_rendezvous) == (True, False)
    assert program.environment is not None
    assert program.environment["PET_LOG_DIR"] == str(tmp_path / "torchrun")


@pytest.mark.parametrize(
    ("user_command", "message"),
    [
        pytest.param(
            command(script="a.py", working_dir="/nowhere"), "workingDir: /nowhere: no such", id="missing folder"
        ),
        pytest.param(command(script="a.py"), r"script: a\.py: no such file in ", id="missing script"),
        pytest.param(
            command(exec=("swift", "sft")), r"exec: swift: no such program in the image \(PATH", id="missing program"
        ),
        pytest.param(command(exec=("./run.sh",)), r"exec: \./run\.sh: no such program", id="missing file"),
    ],
)
def test_missing_file_is_named_in_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user_command: UserCommand, message: str
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(InvalidCommand, match=message):
        plan_program(user_command, node(tmp_path), ENV)


def test_command_is_read_from_the_config(tmp_path: Path) -> None:
    config = tmp_path / "job.json"
    config.write_text(json.dumps({"command": {"script": "a.py", "workingDir": "/w"}}))
    assert read_command({"FINETUNE_CONFIG": str(config)}) == command(script="a.py", working_dir="/w")
    for text in ('{"sft": {}}', "[]", "no json"):
        config.write_text(text)
        assert read_command({"FINETUNE_CONFIG": str(config)}) is None
    assert read_command({}) is None
