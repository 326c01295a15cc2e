"""Tests of the termination message that a supervisor process writes after a failed program."""

import json
import subprocess
import sys
from pathlib import Path

from finetune_supervisor import contract
from testing.processes.supervisor_environment import build_supervisor_environment

HIDDEN_VALUE = "a-token-of-a-user"

# Program that runs the supervisor with a patched statvfs, which reports no free blocks on the output volume.
FULL_OUTPUT = """
import os, runpy, sys
original = os.statvfs
def statvfs(path):
    stats = original(path)
    if str(path) != os.environ["FINETUNE_OUTPUT"]:
        return stats
    return os.statvfs_result((*stats[:3], 0, 0, *stats[5:10]))
os.statvfs = statvfs
runpy.run_module("finetune_supervisor", run_name="__main__", alter_sys=True)
"""


def run_and_read_termination(
    folder: Path, program: str, *, supervisor_args: tuple[str, ...], **variables: str
) -> dict[str, str]:
    """Run a Python program under a supervisor and return the termination message."""
    config = folder / "job.json"
    config.write_text(json.dumps({"command": {"exec": [sys.executable, "-c", program]}}))
    subprocess.run(
        [sys.executable, *supervisor_args],
        env={
            **build_supervisor_environment(folder),
            contract.CONFIG: str(config),
            "MASTER_ADDR": "localhost",
            **variables,
        },
        timeout=60,
        check=False,
        capture_output=True,
    )
    termination: dict[str, str] = json.loads((folder / "termination-log").read_text())
    return termination


def test_termination_message_contains_no_secret(tmp_path: Path) -> None:
    raises = "import os; raise ValueError('401 for ' + os.environ['USER_VARIABLE'])"
    module = ("-m", "finetune_supervisor")
    termination = run_and_read_termination(
        tmp_path, raises, supervisor_args=module, USER_VARIABLE=HIDDEN_VALUE, FINETUNE_HIDDEN_ENV="USER_VARIABLE"
    )

    assert "401 for ***" in termination["message"]
    assert HIDDEN_VALUE not in json.dumps(termination)


def test_termination_message_names_the_full_volume(tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.mkdir()
    termination = run_and_read_termination(
        tmp_path, "import os; raise OSError(28, os.strerror(28))", supervisor_args=("-c", FULL_OUTPUT)
    )

    assert "No space left on device" in termination["message"]
    assert f"(full: {output})" in termination["message"]
