"""What a supervisor leaves behind of a program that failed, as a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

from finetune_supervisor import contract
from testing.processes.supervisor_environment import environment

HIDDEN = "a-token-of-somebody"

# The supervisor, on a machine where the volume of the output has no block left.
FULL_OUTPUT = """
import os, runpy, sys
seen = os.statvfs
def statvfs(path):
    there = seen(path)
    if str(path) != os.environ["FINETUNE_OUTPUT"]:
        return there
    return os.statvfs_result((*there[:3], 0, 0, *there[5:10]))
os.statvfs = statvfs
runpy.run_module("finetune_supervisor", run_name="__main__", alter_sys=True)
"""


def last_words(folder: Path, program: str, *, supervisor: tuple[str, ...], **variables: str) -> dict[str, str]:
    config = folder / "job.json"
    config.write_text(json.dumps({"command": {"exec": [sys.executable, "-c", program]}}))
    subprocess.run(
        [sys.executable, *supervisor],
        env={**environment(folder), contract.CONFIG: str(config), "MASTER_ADDR": "localhost", **variables},
        timeout=60,
        check=False,
        capture_output=True,
    )
    said: dict[str, str] = json.loads((folder / "termination-log").read_text())
    return said


def test_they_hold_no_secret(tmp_path: Path) -> None:
    raises = "import os; raise ValueError('401 for ' + os.environ['MINE'])"
    plain = ("-m", "finetune_supervisor")
    said = last_words(tmp_path, raises, supervisor=plain, MINE=HIDDEN, FINETUNE_HIDDEN_ENV="MINE")

    assert "401 for ***" in said["message"]
    assert HIDDEN not in json.dumps(said)


def test_they_name_the_volume_that_is_full(tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.mkdir()
    said = last_words(tmp_path, "import os; raise OSError(28, os.strerror(28))", supervisor=("-c", FULL_OUTPUT))

    assert "No space left on device" in said["message"]
    assert f"(full: {output})" in said["message"]
