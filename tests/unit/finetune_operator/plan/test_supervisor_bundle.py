"""Tests of the zip file with the supervisor sources, which runs in user images."""

import base64
import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from finetune_operator.plan import supervisor_bundle
from finetune_operator.plan.supervisor_bundle import SupervisorMissing, pack_supervisor
from testing.processes.supervisor_file import write_supervisor


def test_bundle_contains_only_the_supervisor() -> None:
    with zipfile.ZipFile(io.BytesIO(base64.b64decode(pack_supervisor()))) as archive:
        names = set(archive.namelist())

    assert {"__main__.py", "finetune_supervisor/__init__.py", "finetune_supervisor/launch/launcher.py"} <= names
    assert all(name.startswith("finetune_supervisor/") for name in names - {"__main__.py"})


def test_bundle_is_reproducible_and_fits_into_a_config_map() -> None:
    assert pack_supervisor() == pack_supervisor()
    assert len(pack_supervisor()) < 125_000  # a ConfigMap is limited to 1 MiB, and each attempt of a command has one


def test_missing_supervisor_sources_raise_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_bundle, "PACKAGE", "nowhere")

    with pytest.raises(SupervisorMissing, match=r"nowhere is not installed beside finetune_operator"):
        pack_supervisor()


def test_bundle_runs_without_third_party_packages(tmp_path: Path) -> None:
    """Run the bundle in isolated mode without packages, as in an image that contains only python3."""
    file = write_supervisor(tmp_path)

    process = subprocess.run(
        [sys.executable, "-I", "-S", str(file)], capture_output=True, text=True, check=False, env={}
    )

    assert process.returncode == 2
    assert "FINETUNE_NAMESPACE is missing" in process.stderr


def test_the_supervisor_starts_a_program_and_exits_with_its_code(tmp_path: Path) -> None:
    arguments = [
        sys.executable,
        str(write_supervisor(tmp_path)),
        "exec",
        "/bin/sh",
        "-c",
        "echo $1; exit 7",
        "sh",
        "a b",
    ]

    process = subprocess.run(arguments, capture_output=True, text=True, check=False)

    assert (process.returncode, process.stdout) == (7, "a b\n")
