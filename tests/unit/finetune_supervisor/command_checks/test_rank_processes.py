"""Tests of finding ranks and their connections, with real processes and sockets."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from finetune_supervisor.command_checks.rank_processes import RankProcess, find_connected_ranks, find_rank_processes

LAUNCHER_PORT = 29_500
# connects to a port if one is given, reports the PIDs of its processes, and waits for the end of its input
PROGRAM = """
import os, socket, sys
name, port, has_child = sys.argv[1:]
if name:
    open("/proc/self/comm", "w").write(name)
if port:
    connection = socket.create_connection(("127.0.0.1", int(port)))
child = os.fork() if has_child else None
if child != 0:
    print(os.getpid(), child or "", flush=True)
sys.stdin.read()
"""


class Program:
    """A launcher process whose child processes are the ranks, as torchrun's are."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def start(self, name: str = "", port: int | str = "", *, has_child: bool = False, **env: str) -> list[int]:
        """Start a child of this process, and return its PID and that of its own child."""
        process = subprocess.Popen(
            (sys.executable, "-c", PROGRAM, name, str(port), "yes" if has_child else ""),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PATH": os.environ["PATH"], **env},
        )
        assert process.stdout is not None
        assert process.stdin is not None
        self._stack.callback(process.stdout.close)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return [int(pid) for pid in process.stdout.readline().split()]


@pytest.fixture
def program() -> Iterator[Program]:
    with ExitStack() as stack:
        yield Program(stack)


@pytest.fixture
def store_port() -> Iterator[int]:
    """Return the port of a server that accepts connections, as the store of a process group does."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as server:
        yield server.getsockname()[1]


def find() -> tuple[RankProcess, ...]:
    return tuple(sorted(find_rank_processes(os.getpid(), master_port=LAUNCHER_PORT), key=lambda each: each.pid))


def test_ranks_are_found_by_their_environment_or_by_the_name_of_the_launcher(program: Program) -> None:
    (by_environment,) = program.start(RANK="5", WORLD_SIZE="8", MASTER_PORT="4711")
    (by_name,) = program.start("rank-2")
    program.start()
    program.start(RANK="0", WORLD_SIZE="1")
    program.start(RANK="zero", WORLD_SIZE="8")

    assert set(find()) == {RankProcess(by_environment, 5, 4711), RankProcess(by_name, 2, LAUNCHER_PORT)}


def test_only_descendants_are_searched(program: Program) -> None:
    (pid,) = program.start(RANK="5", WORLD_SIZE="8")

    assert [process.pid for process in find_rank_processes(pid, master_port=1)] == [pid]
    assert find_rank_processes(program.start()[0], master_port=1) == ()


def test_a_rank_is_connected_if_one_of_its_processes_has_a_connection_to_its_store(
    program: Program, store_port: int
) -> None:
    program.start(port=store_port, RANK="0", WORLD_SIZE="4", MASTER_PORT=str(store_port))
    program.start(RANK="1", WORLD_SIZE="4", MASTER_PORT=str(store_port))
    program.start(port=store_port, RANK="2", WORLD_SIZE="4", MASTER_PORT="4711")
    pids = program.start(port=store_port, has_child=True, RANK="3", WORLD_SIZE="4", MASTER_PORT=str(store_port))

    processes = find()

    assert {process.pid for process in processes if process.rank == 3} == set(pids)
    assert find_connected_ranks(processes) == {0, 3}


def test_the_rank_that_serves_the_store_is_connected(program: Program, store_port: int) -> None:
    program.start(port=store_port, RANK="1", WORLD_SIZE="2", MASTER_PORT=str(store_port))
    own_process = RankProcess(os.getpid(), 0, store_port)
    assert find_connected_ranks((own_process,)) == frozenset()

    with socket.create_connection(("127.0.0.1", store_port)):
        assert find_connected_ranks((own_process,)) == {0}


def test_processes_that_have_ended_and_other_systems_are_no_error(tmp_path: Path) -> None:
    assert find_rank_processes(2**22 + 1, master_port=1) == ()
    assert find_connected_ranks((RankProcess(2**22 + 1, 0, 1),)) == frozenset()
    assert find_rank_processes(1, master_port=1, proc=tmp_path) == ()
    assert find_connected_ranks((RankProcess(1, 0, 1),), proc=tmp_path) == frozenset()
