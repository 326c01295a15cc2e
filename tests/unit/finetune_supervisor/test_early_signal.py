"""A pod that is deleted as soon as it starts: the signal comes before the supervisor is ready for it."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from testing.processes.supervisor_environment import environment

# Sends itself the signal while the supervisor's own modules are still being imported.
START = """
import os, runpy, signal, sys

class Early:
    def find_spec(self, name, *_):
        if name == "finetune_supervisor.supervisor":
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Early())
sys.argv[:] = ["supervisor", *sys.argv[1:]]
runpy.run_module("finetune_supervisor", run_name="__main__", alter_sys=True)
"""


def test_it_is_stopped_before_training_begins(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", START], env=environment(tmp_path), timeout=60, check=False)

    assert done.returncode == 143
    said = json.loads((tmp_path / "termination-log").read_text())
    assert (said["final"], said["outcome"], said["message"]) == (True, "stopped", "stopped before training began")


@pytest.mark.parametrize("early", [True, False])
def test_a_program_that_was_to_be_started_is_not(tmp_path: Path, early: bool) -> None:
    start = START.replace(
        "finetune_supervisor.supervisor", "finetune_supervisor.launch.child_process" if early else "nothing"
    )
    done = subprocess.run(
        [sys.executable, "-c", start, "exec", "/bin/echo", "ran"],
        env=environment(tmp_path),
        timeout=60,
        check=False,
        capture_output=True,
        text=True,
    )

    assert (done.returncode, done.stdout) == ((-signal.SIGTERM, "") if early else (0, "ran\n"))
