"""Launcher that starts the ranks of this node like torchrun, but imports libraries only once.

Usage: `... ranks SCRIPT ARGS` or `... ranks -m MODULE`.

The launcher imports the libraries of the ranks while DNS and the other nodes become ready, and then forks the ranks
before it starts any thread. The forks wait until all nodes have joined the rendezvous.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from finetune_supervisor.contract import Node, RunFolder
from finetune_supervisor.launch.child_process import SignalInbox, die_with_parent
from finetune_supervisor.launch.preload import can_fork_safely, preload_script
from finetune_supervisor.launch.rank_process import (
    RankProgram,
    build_rank_environment,
    detach_fork,
    exit_without_teardown,
    run_rank_program,
)
from finetune_supervisor.launch.rendezvous import Rendezvous
from finetune_supervisor.launch.wait_for_dns import wait_for_master

_FAILURE_GRACE_SECONDS = 0.3  # delay in which the other ranks can report their own failures before they are terminated
_SIGKILL_DELAY_SECONDS = 30.0


def main(args: list[str]) -> int:
    """Start the ranks and exit with 0 if all of them succeed.

    In a forked rank, run the program and return its exit code.
    """
    die_with_parent()
    # Import shared libraries once for all ranks (decisions/301).
    node, program = Node.from_environment(os.environ), RankProgram.parse(args)
    if node.ranks_per_node > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # torch.cuda.is_available must not initialize CUDA
    in_process = _preload(program)
    # Fork the ranks, which wait to read a byte from the pipe.
    start_pipe = os.pipe()
    ranks: dict[int, int] = {}
    for local_rank in range(node.ranks_per_node):
        pid = _fork()
        if pid == 0:
            return _run_rank(node, local_rank, program, start_pipe=start_pipe, in_process=in_process)
        ranks[pid] = local_rank
    # Wait for the other nodes.
    try:
        rendezvous = _join_rendezvous(node)
    except Exception as error:  # report any error, such as a DNS timeout, a port in use or missing nodes
        _write_launcher_error(node.run_folder, error)
        raise
    # Release the waiting ranks, and wait until they have exited.
    for local_rank in ranks.values():
        _get_error_file(node, local_rank).parent.mkdir(parents=True, exist_ok=True)
    inbox = SignalInbox(0)
    os.write(start_pipe[1], b"g" * len(ranks))
    code = _RunningRanks(node.run_folder, ranks, inbox, rendezvous).wait()
    sys.stderr.flush()
    os._exit(code)  # skip interpreter shutdown (0.2 s)


def _preload(program: RankProgram) -> bool:
    """Import the libraries of the ranks and return whether the ranks can run in forks of this process."""
    if sys.platform != "linux":  # on other systems, the libraries do not support fork
        return False
    gc.disable()  # garbage collection takes a sixth of the import time and frees almost nothing
    if program.module is not None:
        importlib.import_module(program.module).prepare()
    else:
        preload_script(Path(program.script or ""))
    gc.freeze()  # exclude a million imported objects from garbage collection, which would copy their pages in the forks
    gc.enable()
    return can_fork_safely()


def _fork() -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    with (
        warnings.catch_warnings()
    ):  # Python warns about forking with threads, but only BLAS has threads, and it supports fork
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _run_rank(
    node: Node, local_rank: int, program: RankProgram, *, start_pipe: tuple[int, int], in_process: bool
) -> int:
    detach_fork(f"rank-{node.to_global_rank(local_rank)}")
    os.environ.update(build_rank_environment(node, local_rank, _get_error_file(node, local_rank)))
    reader, writer = start_pipe
    os.close(writer)
    start = os.read(reader, 1)
    os.close(reader)
    if not start:
        os._exit(1)  # end of file: the launcher has exited
    code = run_rank_program(program, in_process=in_process)
    if program.module is not None:  # user scripts may rely on the normal interpreter shutdown
        exit_without_teardown(code)
    return code


def _join_rendezvous(node: Node) -> Rendezvous:
    wait_for_master(node.master_addr, node_rank=node.node_rank, pause=time.sleep)
    rendezvous = Rendezvous(node)
    rendezvous.wait_for_all()
    return rendezvous


def _get_error_file(node: Node, local_rank: int) -> Path:
    """Return the path of a rank's error file, in the folder layout of torchrun."""
    return node.run_folder.error_files / "ranks" / "attempt_0" / str(local_rank) / "error.json"


def _write_launcher_error(run_folder: RunFolder, error: Exception) -> None:
    record = {"message": f"{type(error).__name__}: {error}", "extraInfo": {"py_callstack": traceback.format_exc()}}
    run_folder.launcher_error.write_text(json.dumps({"message": record}), encoding="utf-8")


@dataclass
class _RunningRanks:
    """Supervises the ranks of this node until all of them have exited."""

    run_folder: RunFolder
    local_ranks: dict[int, int]  # local ranks of running processes by PID
    inbox: SignalInbox
    rendezvous: Rendezvous
    exits: dict[str, dict[str, float]] = field(default_factory=dict)
    failed_at: float | None = None
    terminate_at: float = 0.0
    is_terminated: bool = False
    forwarded_stops: int = 0

    def wait(self) -> int:
        while self.local_ranks:
            self._reap()
            self._forward_stop_signals()
            self._terminate_after_failure()
            if self.local_ranks:
                self.inbox.wait(0.1 if self.failed_at is not None else 1.0)
        if self.failed_at is not None:
            return 1
        self.rendezvous.leave(self._pause)
        return 0

    def _reap(self) -> None:
        while self.local_ranks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            local_rank = self.local_ranks.pop(pid, None)
            code = os.waitstatus_to_exitcode(status)
            if local_rank is not None and code != 0:
                self._record_failure(local_rank, code)

    def _record_failure(self, local_rank: int, code: int) -> None:
        self.exits[str(local_rank)] = {"code": code, "time": time.time()}
        temporary = self.run_folder.rank_exits.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.exits), encoding="utf-8")
        temporary.replace(self.run_folder.rank_exits)
        if self.failed_at is None:
            self.failed_at = time.monotonic()
            was_killed = (
                code == -signal.SIGKILL
            )  # after an external SIGKILL, the other ranks cannot report a better error
            self.terminate_at = self.failed_at + (0.0 if was_killed else _FAILURE_GRACE_SECONDS)
            others = "; stopping the other ranks of this node" if self.local_ranks else ""
            print(f"launcher: local rank {local_rank} ended with {code}{others}", file=sys.stderr, flush=True)

    def _forward_stop_signals(self) -> None:
        if self.inbox.stop_count > self.forwarded_stops:
            self.forwarded_stops = self.inbox.stop_count
            self._signal(signal.SIGTERM)

    def _terminate_after_failure(self) -> None:
        if self.failed_at is None:
            return
        now = time.monotonic()
        if now >= self.terminate_at and not self.is_terminated:
            self.is_terminated = True
            self._signal(signal.SIGTERM)
        if now - self.failed_at >= _SIGKILL_DELAY_SECONDS:
            self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to the process group of each rank."""
        for pid in self.local_ranks:
            try:
                os.killpg(pid, number)
            except ProcessLookupError:
                continue

    def _pause(self, seconds: float) -> None:
        if self.inbox.stop_count:
            sys.exit(0)  # exit code 0, because a stop request stops all nodes
        self.inbox.wait(seconds)
