"""The launcher with real forks and small scripts: what a rank sees, what is told of its end, and how others end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from testing.processes.supervisor_environment import environment
from testing.processes.supervisor_file import write_supervisor
from testing.processes.supervisors import free_port

pytestmark = pytest.mark.slow

TELLS = """
import torch
import json, multiprocessing, os, random, signal, sys
import numpy
seen = {
    "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__, "doc": __doc__,
    "main": sys.modules["__main__"].__dict__ is globals(),
    "process": multiprocessing.current_process().name,
    "ours": [name for name in sys.modules if name.startswith("finetune")],
    "dice": [random.random(), float(numpy.random.rand())],
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
    json.dump(seen, file)
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


def launch(folder: Path, source: str, *args: str, **variables: str) -> subprocess.Popen[str]:
    """Two ranks of one node."""
    script = folder / "train.py"
    script.write_text(source)
    meets = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NNODES": "1", "NODE_RANK": "0"}
    ranks = {"NPROC_PER_NODE": "2", "FINETUNE_WORLD_SIZE": "2", "PYTHONPATH": ""}
    return subprocess.Popen(
        [sys.executable, "-u", str(write_supervisor(folder)), "ranks", str(script), *args],
        env={**environment(folder), **meets, **ranks, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    said, _ = process.communicate(timeout=60)
    return process.returncode, said


def exits(folder: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads((folder / "run" / "exits.json").read_text())
    return found


@pytest.mark.parametrize("in_place", [True, False], ids=["forked", "started"])
def test_a_script_sees_what_it_would_see_under_torchrun(tmp_path: Path, in_place: bool) -> None:
    first = "" if in_place else "import os; os.environ['X'] = ''\n"

    code, said = finish(launch(tmp_path, first + TELLS, str(tmp_path), "--more", *VARIABLES))

    assert code == 0, said
    one, two = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert (one["forked"], two["forked"]) == (in_place, in_place)
    assert one["argv"] == [str(tmp_path / "train.py"), str(tmp_path), "--more", *VARIABLES]
    assert (one["path"], one["name"], one["file"]) == (str(tmp_path), "__main__", str(tmp_path / "train.py"))
    assert (one["main"], one["process"], one["ours"]) == (True, "MainProcess", [])
    assert one["signals"] == [True, True, True]
    assert one["group"]
    assert one["dice"][0] != two["dice"][0]
    assert one["dice"][1] != two["dice"][1]
    assert two["env"] == VARIABLES


FAILS = """
import torch
import os, sys, time
if os.environ["RANK"] == "0":
    time.sleep(60)
{how}
"""


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("sys.exit(42)", 42),
        ("os.kill(os.getpid(), 9)", -9),
        ("os.kill(os.getpid(), 11)", -11),
        ("sys.exit('no data')", 1),
        ("raise ValueError('no label')", 1),
    ],
)
def test_the_end_of_a_rank_is_told_exactly_and_ends_the_others(tmp_path: Path, how: str, code: int) -> None:
    began = time.time()

    ended, said = finish(launch(tmp_path, FAILS.format(how=how)))

    assert ended == 1
    found = exits(tmp_path)
    assert (found["1"]["code"], found["0"]["code"]) == (code, -signal.SIGTERM)
    assert began < found["1"]["time"] < found["0"]["time"] < began + 30
    assert f"launcher: local rank 1 ended with {code}; the others of this node are ended" in said


def test_an_exception_is_told_as_python_tells_it(tmp_path: Path) -> None:
    """Without a line of ours above the script's; a debugger's eye, and the patterns, find the script's own frames."""
    _, said = finish(launch(tmp_path, FAILS.format(how="raise ValueError('no label')")))

    lines = said.splitlines()
    begin = lines.index("Traceback (most recent call last):")
    assert lines[begin + 1].startswith(f'  File "{tmp_path}/train.py", line 6, in <module>')
    assert "supervisor" not in said.replace(str(tmp_path), "")
    assert "ValueError: no label" in said


def test_the_last_words_of_others_are_waited_for(tmp_path: Path) -> None:
    """Who raised may exit after its victims: it must not be ended in the middle of its traceback."""
    source = """
import torch
import os, time
if os.environ["RANK"] == "0":
    os._exit(1)
time.sleep(0.15)
os._exit(7)
"""
    finish(launch(tmp_path, source))

    assert {rank: seen["code"] for rank, seen in exits(tmp_path).items()} == {"0": 1, "1": 7}


def test_nothing_is_waited_for_when_a_rank_was_killed(tmp_path: Path) -> None:
    source = """
import torch
import os, time
if os.environ["RANK"] == "0":
    os.kill(os.getpid(), 9)
time.sleep(0.15)
os._exit(7)
"""
    finish(launch(tmp_path, source))

    assert {rank: seen["code"] for rank, seen in exits(tmp_path).items()} == {"0": -9, "1": -signal.SIGTERM}


def test_sigterm_reaches_every_rank_which_may_end_well(tmp_path: Path) -> None:
    source = """
import torch
import os, signal, sys, time
def save(number, frame):
    open(os.path.join(sys.argv[1], "saved-" + os.environ["RANK"]), "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
open(os.path.join(sys.argv[1], "ready-" + os.environ["RANK"]), "w").close()
while True:
    time.sleep(0.05)
"""
    process = launch(tmp_path, source, str(tmp_path))
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("ready-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)

    process.terminate()

    code, said = finish(process)
    assert code == 0, said
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == ["saved-0", "saved-1"]


def test_what_is_registered_for_the_end_of_a_process_is_done(tmp_path: Path) -> None:
    source = """
import torch
import atexit, os, sys
atexit.register(lambda: os.write(1, b"the end of rank " + os.environ["RANK"].encode() + b"\\n"))
"""
    code, said = finish(launch(tmp_path, source))

    assert code == 0
    assert sorted(said.splitlines()) == ["the end of rank 0", "the end of rank 1"]


def test_ranks_do_not_outlive_a_launcher_that_is_killed(tmp_path: Path) -> None:
    source = """
import torch
import os, sys, time
open(os.path.join(sys.argv[1], "pid-" + str(os.getpid())), "w").close()
time.sleep(60)
"""
    process = launch(tmp_path, source, str(tmp_path))
    deadline = time.monotonic() + 60
    while len(pids := [int(path.name[4:]) for path in tmp_path.glob("pid-*")]) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)

    process.kill()
    process.communicate()

    assert len(pids) == 2
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_port_that_is_taken_is_the_launchers_own_error(tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        code, said = finish(launch(tmp_path, "import torch\n", MASTER_PORT=str(taken.getsockname()[1])))

    assert code == 1
    error = json.loads((tmp_path / "run" / "launcher-error.json").read_text())["message"]["message"]
    assert "EADDRINUSE" in error or "address already in use" in error.lower(), said
    assert os.listdir(tmp_path / "run") == ["launcher-error.json"]
