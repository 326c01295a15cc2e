"""The one file that brings the supervisor into images of users."""

import base64
import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from finetune_operator.plan import supervisor_bundle as supervisor_file
from finetune_operator.plan.supervisor_bundle import SupervisorMissing, pack_supervisor
from testing.processes.supervisor_file import write_supervisor


def test_it_holds_the_supervisor_and_nothing_else() -> None:
    with zipfile.ZipFile(io.BytesIO(base64.b64decode(pack_supervisor()))) as archive:
        held = set(archive.namelist())

    assert {"__main__.py", "finetune_supervisor/__init__.py", "finetune_supervisor/launch/launcher.py"} <= held
    assert all(name.startswith("finetune_supervisor/") for name in held - {"__main__.py"})


def test_the_same_sources_make_the_same_file_that_a_config_map_can_hold() -> None:
    assert pack_supervisor() == pack_supervisor()
    assert len(pack_supervisor()) < 100_000  # of a MiB, for every attempt of every such job


def test_an_installation_without_the_sources_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_file, "PACKAGE", "nowhere")

    with pytest.raises(SupervisorMissing, match=r"nowhere is not installed beside finetune_operator"):
        pack_supervisor()


def test_it_runs_alone(tmp_path: Path) -> None:
    """Isolated: neither the project nor any package is there, as in an image that has only python3."""
    file = write_supervisor(tmp_path)

    done = subprocess.run([sys.executable, "-I", "-S", str(file)], capture_output=True, text=True, check=False, env={})

    assert done.returncode == 2
    assert "FINETUNE_NAMESPACE is missing" in done.stderr


def test_it_becomes_the_program_that_it_starts(tmp_path: Path) -> None:
    words = [sys.executable, str(write_supervisor(tmp_path)), "exec", "/bin/sh", "-c", "echo $1; exit 7", "sh", "a b"]

    done = subprocess.run(words, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (7, "a b\n")
