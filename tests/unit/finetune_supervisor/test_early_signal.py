"""Tests of a SIGTERM that arrives while the supervisor is still importing its modules."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from testing.processes.supervisor_environment import build_supervisor_environment

# Program that sends SIGTERM to itself when it imports the module finetune_supervisor.supervisor.
SIGNALLING_PROGRAM = """
import os, runpy, signal, sys

class SignalOnImport:
    def find_spec(self, name, *_):
        if name == "finetune_supervisor.supervisor":
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, SignalOnImport())
sys.argv[:] = ["supervisor", *sys.argv[1:]]
runpy.run_module("finetune_supervisor", run_name="__main__", alter_sys=True)
"""


def read_entrypoint() -> list[str]:
    """Return the last entrypoint of the Dockerfile, which is that of the trainer image."""
    lines = (Path(__file__).parents[3] / "Dockerfile").read_text().splitlines()
    entrypoint: list[str] = json.loads(
        [line for line in lines if line.startswith("ENTRYPOINT")][-1].split(maxsplit=1)[1]
    )
    return entrypoint


def build_signalled_entrypoint() -> list[str]:
    """Return the entrypoint of the image with a shell that gets SIGTERM before it becomes the Python interpreter."""
    env, block, python, *arguments = read_entrypoint()
    assert (env, python) == ("env", "python")
    return [env, block, "sh", "-c", 'kill -TERM $$; exec "$@"', "sh", sys.executable, *arguments]


@pytest.mark.parametrize(
    "command",
    [
        pytest.param([sys.executable, "-c", SIGNALLING_PROGRAM], id="during the imports"),
        pytest.param(build_signalled_entrypoint(), id="before Python starts"),
    ],
)
def test_early_signal_stops_the_supervisor_before_training(command: list[str], tmp_path: Path) -> None:
    process = subprocess.run(command, env=build_supervisor_environment(tmp_path), timeout=60, check=False)

    assert process.returncode == 143
    termination = json.loads((tmp_path / "termination-log").read_text())
    assert (termination["final"], termination["outcome"], termination["message"]) == (
        True,
        "stopped",
        "stopped before training began",
    )


@pytest.mark.parametrize(
    "has_early_signal", [pytest.param(True, id="early signal"), pytest.param(False, id="no signal")]
)
def test_exec_does_not_start_its_program_after_an_early_signal(tmp_path: Path, has_early_signal: bool) -> None:
    program = SIGNALLING_PROGRAM.replace(
        "finetune_supervisor.supervisor",
        "finetune_supervisor.launch.child_process" if has_early_signal else "no_such_module",
    )
    process = subprocess.run(
        [sys.executable, "-c", program, "exec", "/bin/echo", "ran"],
        env=build_supervisor_environment(tmp_path),
        timeout=60,
        check=False,
        capture_output=True,
        text=True,
    )

    assert (process.returncode, process.stdout) == ((-signal.SIGTERM, "") if has_early_signal else (0, "ran\n"))
