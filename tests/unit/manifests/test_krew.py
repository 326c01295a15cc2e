"""Tests of the program of the kubectl plugin, with a Python that records how it is started."""

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "integrations/krew/kubectl-finetune"
RECORDING_PYTHON = """#!/bin/sh
for argument; do printf '[%s]' "$argument"; done >> "$RECORD"; echo >> "$RECORD"
[ "$2 $3" = "-m venv" ] || exit 0
mkdir -p "$5/bin"
cp "$0" "$5/bin/python"
"""


def test_python_is_isolated_and_folders_may_have_spaces(tmp_path: Path) -> None:
    """The working directory may contain a venv.py or pip.py, which would run instead of the modules of Python."""
    folder, python, record = tmp_path / "my plugin", tmp_path / "my python", tmp_path / "record"
    folder.mkdir()
    (folder / "kubectl-finetune").write_text(SCRIPT.read_text().replace("@VERSION@", "1"))
    (folder / "finetune_operator-1-py3-none-any.whl").touch()
    python.write_text(RECORDING_PYTHON)
    python.chmod(0o755)
    variables = {"PATH": os.environ["PATH"], "HOME": str(tmp_path / "my home"), "RECORD": str(record)}
    command = ("sh", folder / "kubectl-finetune", "list", "a b")

    subprocess.run(command, env={**variables, "FINETUNE_PYTHON": str(python)}, check=True, capture_output=True)

    environment = tmp_path / "my home/.cache/kubectl-finetune/1"
    _, venv, packages, wheel, program = record.read_text().splitlines()
    assert all(line.startswith("[-I]") for line in record.read_text().splitlines())
    assert venv == f"[-I][-m][venv][--clear][{environment}]"
    assert packages.endswith(f"[--requirement][{folder}/cli.txt]")
    assert wheel.endswith(f"[--no-index][{folder}/finetune_operator-1-py3-none-any.whl]")
    assert program == f"[-I][{environment}/bin/kubectl-finetune][list][a b]"
