"""What a command becomes on a node."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from finetune_supervisor.launch.user_command import Command, InvalidCommand, expand, plan_program, read_command
from testing.builders.nodes import node

ENV = {"PATH": "/usr/bin:/bin", "FINETUNE_OUTPUT": "/output/default/bert", "EMPTY": ""}


def command(**fields: Any) -> Command:
    return Command(**{"script": None, "args": (), "exec": (), "working_dir": None, **fields})


@pytest.mark.parametrize(
    ("word", "becomes"),
    [
        pytest.param("--out=$(FINETUNE_OUTPUT)/x", "--out=/output/default/bert/x", id="a variable"),
        pytest.param("$(EMPTY)", "", id="an empty one"),
        pytest.param("$(UNKNOWN)", "$(UNKNOWN)", id="an unknown one"),
        pytest.param("$$(FINETUNE_OUTPUT)", "$(FINETUNE_OUTPUT)", id="escaped"),
        pytest.param("$HOME ${HOME} a b", "$HOME ${HOME} a b", id="a shell's words"),
    ],
)
def test_words_are_expanded_as_kubernetes_does(word: str, becomes: str) -> None:
    assert expand(word, ENV) == becomes


def test_a_script_is_what_the_launcher_starts_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    asked = command(script="train.py", args=("--out", "$(FINETUNE_OUTPUT)"), working_dir=str(tmp_path))

    program = plan_program(asked, node(tmp_path, node_rank=1), ENV)

    assert program.argv[-4:] == ("ranks", "train.py", "--out", "/output/default/bert")
    assert (program.folder, program.group, program.meets) == (tmp_path, False, True)


def test_where_python_has_no_torch_a_torchrun_of_another_starts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes, ranks and the master's address are in the environment that it reads."""
    (tmp_path / "train.py").touch()
    torchrun = tmp_path / "torchrun"
    torchrun.touch(mode=0o755)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)

    asked = command(script="train.py", working_dir=str(tmp_path))
    program = plan_program(asked, node(tmp_path), {**ENV, "PATH": str(tmp_path)})

    logs = f"--log_dir={tmp_path / 'torchrun'}"
    assert program.argv[-5:] == ("exec", str(torchrun), "--max_restarts=0", logs, "train.py")
    assert not program.meets


def test_a_program_is_started_as_it_is_and_gets_every_signal(tmp_path: Path) -> None:
    program = plan_program(command(exec=("sh", "-c", "echo $(EMPTY)")), node(tmp_path), ENV)

    assert program.argv[-3:][1:] == ("-c", "echo ")
    assert program.argv[-3].endswith("/sh")
    assert (program.group, program.meets) == (True, False)
    assert program.environment is not None
    assert program.environment["PET_LOG_DIR"] == str(tmp_path / "torchrun")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        pytest.param(command(script="a.py", working_dir="/nowhere"), "workingDir: /nowhere: no such", id="no folder"),
        pytest.param(command(script="a.py"), r"script: a\.py: no such file in ", id="no script"),
        pytest.param(
            command(exec=("swift", "sft")), r"exec: swift: no such program in the image \(PATH", id="no program"
        ),
        pytest.param(command(exec=("./run.sh",)), r"exec: \./run\.sh: no such program", id="no file"),
    ],
)
def test_what_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: Command, message: str
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(InvalidCommand, match=message):
        plan_program(asked, node(tmp_path), ENV)


def test_the_config_tells_whether_it_is_a_command(tmp_path: Path) -> None:
    config = tmp_path / "job.json"
    config.write_text(json.dumps({"command": {"script": "a.py", "workingDir": "/w"}}))
    assert read_command({"FINETUNE_CONFIG": str(config)}) == command(script="a.py", working_dir="/w")
    for text in ('{"sft": {}}', "[]", "no json"):
        config.write_text(text)
        assert read_command({"FINETUNE_CONFIG": str(config)}) is None
    assert read_command({}) is None
