"""What a command becomes on a node, and the one file that runs it in a foreign image."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from finetune_trainer.supervisor.bundle import write_bundle
from finetune_trainer.supervisor.command import Command, InvalidCommand, expand, plan_program, read_command
from support.nodes import node

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


def test_a_script_is_what_torchrun_starts_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    asked = command(script="train.py", args=("--out", "$(FINETUNE_OUTPUT)"), working_dir=str(tmp_path))

    program = plan_program(asked, node(tmp_path, node_rank=1), ENV)

    assert program.argv[-3:] == ("train.py", "--out", "/output/default/bert")
    assert {"finetune_trainer.launch", "--nnodes=2", "--node_rank=1", "--nproc_per_node=2", "--no_python"} <= set(
        program.argv
    )
    assert (program.folder, program.group) == (tmp_path, False)


def test_a_program_is_started_as_it_is_and_gets_every_signal(tmp_path: Path) -> None:
    program = plan_program(command(exec=("sh", "-c", "echo $(EMPTY)")), node(tmp_path), ENV)

    assert program.argv[-3:][1:] == ("-c", "echo ")
    assert program.argv[-3].endswith("/sh")
    assert program.group
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


def test_the_one_file_runs_alone_and_holds_torchruns_wrapper(tmp_path: Path) -> None:
    """Isolated: neither the project nor any package is there, as in an image that has only python3."""
    bundle = tmp_path / "supervisor.pyz"
    write_bundle(bundle)

    done = subprocess.run(
        [sys.executable, "-I", "-S", str(bundle)], capture_output=True, text=True, check=False, env={}
    )

    assert done.returncode == 2
    assert "FINETUNE_NAMESPACE is missing" in done.stderr
    with zipfile.ZipFile(bundle) as archive:
        assert "finetune_trainer/launch.py" in archive.namelist()
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}
    assert bundle.stat().st_mode & 0o444 == 0o444
    assert [path.name for path in tmp_path.iterdir()] == ["supervisor.pyz"]


def test_the_one_file_becomes_the_program_that_it_starts(tmp_path: Path) -> None:
    write_bundle(tmp_path / "supervisor.pyz")
    words = [sys.executable, str(tmp_path / "supervisor.pyz"), "exec", "/bin/sh", "-c", "echo $1; exit 7", "sh", "a b"]

    done = subprocess.run(words, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (7, "a b\n")
