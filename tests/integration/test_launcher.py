"""Tests of the launcher with real forks and small scripts."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from testing.processes.supervisor_environment import build_supervisor_environment
from testing.processes.supervisor_file import write_supervisor
from testing.processes.supervisors import find_free_port

pytestmark = pytest.mark.slow

REPORT_SCRIPT = """
import torch
import json, multiprocessing, os, random, signal, sys
import numpy
report = {
    "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__, "doc": __doc__,
    "main": sys.modules["__main__"].__dict__ is globals(),
    "process": multiprocessing.current_process().name,
    "own_modules": [name for name in sys.modules if name.startswith("finetune")],
    "random_numbers": [random.random(), float(numpy.random.rand())],
    "signals": [
        signal.getsignal(number) is expected
        for number, expected in (
            (signal.SIGTERM, signal.SIG_DFL),
            (signal.SIGCHLD, signal.SIG_DFL),
            (signal.SIGINT, signal.default_int_handler),
        )
    ],
    "group": os.getpgid(0) == os.getpid(),
    "forked": b"ranks" in open("/proc/self/cmdline", "rb").read().split(b"\\0"),
    "env": {name: os.environ.get(name) for name in sys.argv[3:]},
}
with open(os.path.join(sys.argv[1], "rank-" + os.environ["RANK"] + ".json"), "w") as file:
    json.dump(report, file)
"""


VARIABLES = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "ROLE_RANK": "1",
    "TORCHELASTIC_RUN_ID": "ours-0",
}


# Allows the other ranks more time after a failure, so that the order of exits does not depend on the machine's speed.
LAUNCHER_WITH_LONG_GRACE_PERIOD = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from finetune_supervisor.__main__ import main
from finetune_supervisor.launch import launcher
launcher._FAILURE_GRACE_SECONDS = 10
sys.exit(main())
"""


def start_launcher(
    folder: Path, source: str, *args: str, has_long_grace_period: bool = False, **variables: str
) -> subprocess.Popen[str]:
    """Start a launcher with two ranks that run a script with this source."""
    script = folder / "train.py"
    script.write_text(source)
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port()), "NNODES": "1", "NODE_RANK": "0"}
    ranks = {"NPROC_PER_NODE": "2", "FINETUNE_WORLD_SIZE": "2", "PYTHONPATH": ""}
    program = [sys.executable, "-u", *(("-c", LAUNCHER_WITH_LONG_GRACE_PERIOD) if has_long_grace_period else ())]
    return subprocess.Popen(
        [*program, str(write_supervisor(folder)), "ranks", str(script), *args],
        env={**build_supervisor_environment(folder), **rendezvous, **ranks, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_exit(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


def read_exit_codes(folder: Path) -> dict[str, dict[str, Any]]:
    exits: dict[str, dict[str, Any]] = json.loads((folder / "run" / "exits.json").read_text())
    return exits


START_THREAD_IN_LAUNCHER = """
import sys, threading
if "ranks" in sys.orig_argv:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
"""


@pytest.mark.parametrize(
    ("prefix", "sitecustomize", "forked"),
    [
        pytest.param("", "", True, id="forked"),
        pytest.param("import os; os.environ['X'] = ''\n", "", True, id="forked without shared imports"),
        pytest.param("", START_THREAD_IN_LAUNCHER, False, id="new interpreter"),
    ],
)
def test_script_runs_in_the_same_environment_as_under_torchrun(
    tmp_path: Path, prefix: str, sitecustomize: str, forked: bool
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(sitecustomize)
    arguments = (str(tmp_path), "--more", *VARIABLES)

    process = start_launcher(tmp_path, prefix + REPORT_SCRIPT, *arguments, PYTHONPATH=str(tmp_path / "site"))
    code, output = wait_for_exit(process)

    assert code == 0, output
    one, two = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert (one["forked"], two["forked"]) == (forked, forked)
    assert one["argv"] == [str(tmp_path / "train.py"), str(tmp_path), "--more", *VARIABLES]
    assert (one["path"], one["name"], one["file"]) == (str(tmp_path), "__main__", str(tmp_path / "train.py"))
    assert (one["main"], one["process"], one["own_modules"]) == (True, "MainProcess", [])
    assert one["signals"] == [True, True, True]
    assert one["group"]
    assert one["random_numbers"][0] != two["random_numbers"][0]
    assert one["random_numbers"][1] != two["random_numbers"][1]
    assert two["env"] == VARIABLES


PRINT_SCRIPT = """
import os, sys
for number in range(20_000):
    print("line", number, "of rank", os.environ["RANK"], file=(sys.stdout, sys.stderr)[number % 2])
"""


def test_ranks_that_print_at_the_same_time_do_not_mix_up_their_lines(tmp_path: Path) -> None:
    code, output = wait_for_exit(start_launcher(tmp_path, PRINT_SCRIPT, PYTHONUNBUFFERED="1"))

    assert code == 0, output
    expected = {f"line {number} of rank {rank}" for number in range(20_000) for rank in range(2)}
    assert set(output.splitlines()) == expected
    assert len(output.splitlines()) == len(expected)


THREADS_SCRIPT = """
import torch
import json, os, sys
import numpy
values = torch.ones(2**22)
for _ in range(3):
    total = (values.sin() ** 2 + values.cos() ** 2).sum()  # more elements than one thread computes
matrix = numpy.ones((512, 512))
report = {
    "total": float(total),
    "product": float((matrix @ matrix).sum()),
    "torch_threads": torch.get_num_threads(),
    "tasks": len(os.listdir("/proc/self/task")),
    "forked": b"ranks" in open("/proc/self/cmdline", "rb").read().split(b"\\0"),
}
with open(os.path.join(sys.argv[1], "rank-" + os.environ["RANK"] + ".json"), "w") as file:
    json.dump(report, file)
"""


def test_forked_ranks_run_parallel_regions_with_several_threads(tmp_path: Path) -> None:
    """The OpenMP runtime of torch does not survive a fork after its first parallel region."""
    code, output = wait_for_exit(start_launcher(tmp_path, THREADS_SCRIPT, str(tmp_path), OMP_NUM_THREADS="2"))

    assert code == 0, output
    for rank in range(2):
        report = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert report["forked"]
        assert report["torch_threads"] == 2
        assert report["tasks"] >= 2, "the parallel region used one thread"
        assert (report["total"], report["product"]) == (pytest.approx(2**22), 512.0**3)


FAIL_SCRIPT = """
import os, sys, time
if os.environ["RANK"] == "0":
    time.sleep(60)
{failure}
"""


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        pytest.param("sys.exit(42)", 42, id="exit code"),
        pytest.param("os.kill(os.getpid(), 9)", -9, id="SIGKILL"),
        pytest.param("os.kill(os.getpid(), 11)", -11, id="SIGSEGV"),
        pytest.param("sys.exit('no data')", 1, id="exit with a message"),
        pytest.param("raise ValueError('no label')", 1, id="exception"),
    ],
)
def test_failed_rank_is_recorded_and_the_other_ranks_are_terminated(tmp_path: Path, failure: str, code: int) -> None:
    started_at = time.time()

    exit_code, output = wait_for_exit(start_launcher(tmp_path, FAIL_SCRIPT.format(failure=failure)))

    assert exit_code == 1
    exits = read_exit_codes(tmp_path)
    assert (exits["1"]["code"], exits["0"]["code"]) == (code, -signal.SIGTERM)
    assert started_at < exits["1"]["time"] < exits["0"]["time"] < started_at + 30
    assert f"launcher: local rank 1 ended with {code}; stopping the other ranks of this node" in output


def test_traceback_contains_only_frames_of_the_script(tmp_path: Path) -> None:
    """Frames of the launcher would confuse users and match error patterns."""
    _, output = wait_for_exit(start_launcher(tmp_path, FAIL_SCRIPT.format(failure="raise ValueError('no label')")))

    lines = output.splitlines()
    begin = lines.index("Traceback (most recent call last):")
    assert lines[begin + 1].startswith(f'  File "{tmp_path}/train.py", line 5, in <module>')
    assert "supervisor" not in output.replace(str(tmp_path), "")
    assert "ValueError: no label" in output


def test_other_ranks_have_time_to_report_their_own_failures(tmp_path: Path) -> None:
    """A rank may exit after its victims and must not be terminated while it still prints its traceback."""
    source = """
import os, time
if os.environ["RANK"] == "0":
    os._exit(1)
time.sleep(2)
os._exit(7)
"""
    wait_for_exit(start_launcher(tmp_path, source, has_long_grace_period=True))

    assert {rank: rank_exit["code"] for rank, rank_exit in read_exit_codes(tmp_path).items()} == {"0": 1, "1": 7}


def test_other_ranks_are_terminated_immediately_after_a_killed_rank(tmp_path: Path) -> None:
    source = """
import os, time
if os.environ["RANK"] == "0":
    os.kill(os.getpid(), 9)
time.sleep(8)
os._exit(7)
"""
    wait_for_exit(start_launcher(tmp_path, source, has_long_grace_period=True))

    assert {rank: rank_exit["code"] for rank, rank_exit in read_exit_codes(tmp_path).items()} == {
        "0": -9,
        "1": -signal.SIGTERM,
    }


def test_sigterm_is_forwarded_to_every_rank(tmp_path: Path) -> None:
    source = """
import os, signal, sys, time
def save(number, frame):
    open(os.path.join(sys.argv[1], "saved-" + os.environ["RANK"]), "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
open(os.path.join(sys.argv[1], "ready-" + os.environ["RANK"]), "w").close()
while True:
    time.sleep(0.05)
"""
    process = start_launcher(tmp_path, source, str(tmp_path))
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("ready-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)

    process.terminate()

    code, output = wait_for_exit(process)
    assert code == 0, output
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == ["saved-0", "saved-1"]


def test_atexit_handlers_of_ranks_run(tmp_path: Path) -> None:
    source = """
import torch
import atexit, os, sys
atexit.register(lambda: os.write(1, b"the end of rank " + os.environ["RANK"].encode() + b"\\n"))
"""
    code, output = wait_for_exit(start_launcher(tmp_path, source))

    assert code == 0
    assert sorted(output.splitlines()) == ["the end of rank 0", "the end of rank 1"]


def test_ranks_exit_when_the_launcher_is_killed(tmp_path: Path) -> None:
    source = """
import os, sys, time
open(os.path.join(sys.argv[1], "pid-" + str(os.getpid())), "w").close()
time.sleep(60)
"""
    process = start_launcher(tmp_path, source, str(tmp_path))
    deadline = time.monotonic() + 60
    while len(pids := [int(path.name[4:]) for path in tmp_path.glob("pid-*")]) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)

    process.kill()
    process.communicate()

    assert len(pids) == 2
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_port_in_use_is_reported_as_a_launcher_error(tmp_path: Path) -> None:
    import socket

    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        code, output = wait_for_exit(start_launcher(tmp_path, "", MASTER_PORT=str(other.getsockname()[1])))

    assert code == 1
    error = json.loads((tmp_path / "run" / "launcher-error.json").read_text())["message"]["message"]
    assert "EADDRINUSE" in error or "address already in use" in error.lower(), output
    assert os.listdir(tmp_path / "run") == ["launcher-error.json"]
