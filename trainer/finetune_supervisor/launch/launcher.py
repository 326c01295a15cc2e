"""`... ranks SCRIPT ARGS` or `... ranks -m MODULE`: starts the ranks of this node as torchrun does, from one import.

What they all import is imported here, while names resolve and other nodes come; then each is a fork of this process.
The forks are made before this process has a thread of its own, and wait for all nodes.
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
from finetune_supervisor.launch.preload import can_fork, preload_script
from finetune_supervisor.launch.rank_process import Target, become, leave, rank_environment, settle
from finetune_supervisor.launch.rendezvous import Meeting
from finetune_supervisor.launch.wait_for_dns import wait_for_master

_LAST_WORDS_SECONDS = 0.3  # others that fail by themselves within it say more than those that are ended
_KILL_AFTER_SECONDS = 30.0


def main(words: list[str]) -> int:
    """Exit code 0 if all ranks ended with 0. In a rank, what its program ends with."""
    die_with_parent()
    node, target = Node.from_environment(os.environ), Target.read(words)
    if node.ranks_per_node > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # whoever only asks for GPUs leaves CUDA alone
    in_place = _preload(target)
    go = os.pipe()
    ranks: dict[int, int] = {}
    for local_rank in range(node.ranks_per_node):
        pid = _fork()
        if pid == 0:
            return _be_rank(node, local_rank, target, go=go, in_place=in_place)
        ranks[pid] = local_rank
    try:
        meeting = _meet(node)
    except Exception as error:  # the outermost place: a name, a port, nodes that do not come
        _write_error(node.run, error)
        raise
    for local_rank in ranks.values():
        _error_file(node, local_rank).parent.mkdir(parents=True, exist_ok=True)
    inbox = SignalInbox(0)
    os.write(go[1], b"g" * len(ranks))
    code = _Launch(node.run, ranks, inbox, meeting).attend()
    sys.stderr.flush()
    os._exit(code)  # what was imported takes a fifth of a second to say farewell, and nobody listens


def _preload(target: Target) -> bool:
    """Whether ranks can go on from what was imported."""
    if sys.platform != "linux":  # libraries of other systems do not bear a fork
        return False
    gc.disable()  # a sixth of the time of imports, which leave next to nothing to collect
    if target.module is not None:
        importlib.import_module(target.module).prepare()
    else:
        preload_script(Path(target.script or ""))
    gc.freeze()  # a million objects of modules, which every full collection would look at, and so copy
    gc.enable()
    return can_fork() and "torch" in sys.modules


def _fork() -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():  # of threads: those of BLAS, which knows of forks
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _be_rank(node: Node, local_rank: int, target: Target, *, go: tuple[int, int], in_place: bool) -> int:
    settle(f"rank-{node.global_rank(local_rank)}")
    os.environ.update(rank_environment(node, local_rank, _error_file(node, local_rank)))
    os.close(go[1])
    told = os.read(go[0], 1)
    os.close(go[0])
    if not told:
        os._exit(1)  # the launcher is gone
    code = become(target, in_place=in_place)
    if target.module is not None:  # ours; how a script ends is its own affair
        leave(code)
    return code


def _meet(node: Node) -> Meeting:
    wait_for_master(node.master_addr, node_rank=node.node_rank, pause=time.sleep)
    meeting = Meeting(node)
    meeting.wait_for_all()
    return meeting


def _error_file(node: Node, local_rank: int) -> Path:
    """Where torchrun has it too."""
    return node.run.torchrun / "ranks" / "attempt_0" / str(local_rank) / "error.json"


def _write_error(run: RunFolder, error: Exception) -> None:
    said = {"message": f"{type(error).__name__}: {error}", "extraInfo": {"py_callstack": traceback.format_exc()}}
    run.launcher_error.write_text(json.dumps({"message": said}), encoding="utf-8")


@dataclass
class _Launch:
    """The ranks from their start to the end of the last one."""

    run: RunFolder
    ranks: dict[int, int]  # local ranks by process, of those that run
    inbox: SignalInbox
    meeting: Meeting
    exits: dict[str, dict[str, float]] = field(default_factory=dict)
    failed_at: float | None = None
    last_words_until: float = 0.0
    ended: bool = False
    passed_on: int = 0

    def attend(self) -> int:
        while self.ranks:
            self._reap()
            self._pass_on_stops()
            self._end_others()
            if self.ranks:
                self.inbox.wait(0.1 if self.failed_at is not None else 1.0)
        if self.failed_at is not None:
            return 1
        self.meeting.leave(self._pause)
        return 0

    def _reap(self) -> None:
        while self.ranks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            local_rank = self.ranks.pop(pid, None)
            code = os.waitstatus_to_exitcode(status)
            if local_rank is not None and code != 0:
                self._note_failure(local_rank, code)

    def _note_failure(self, local_rank: int, code: int) -> None:
        self.exits[str(local_rank)] = {"code": code, "time": time.time()}
        beside = self.run.exits.with_suffix(".tmp")
        beside.write_text(json.dumps(self.exits), encoding="utf-8")
        beside.replace(self.run.exits)
        if self.failed_at is None:
            self.failed_at = time.monotonic()
            killed = code == -signal.SIGKILL  # from outside: nobody's words say more
            self.last_words_until = self.failed_at + (0.0 if killed else _LAST_WORDS_SECONDS)
            others = "; the others of this node are ended" if self.ranks else ""
            print(f"launcher: local rank {local_rank} ended with {code}{others}", file=sys.stderr, flush=True)

    def _pass_on_stops(self) -> None:
        if self.inbox.stops > self.passed_on:
            self.passed_on = self.inbox.stops
            self._signal(signal.SIGTERM)

    def _end_others(self) -> None:
        if self.failed_at is None:
            return
        now = time.monotonic()
        if now >= self.last_words_until and not self.ended:
            self.ended = True
            self._signal(signal.SIGTERM)
        if now - self.failed_at >= _KILL_AFTER_SECONDS:
            self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        """To each rank with what it has started."""
        for pid in self.ranks:
            try:
                os.killpg(pid, number)
            except ProcessLookupError:
                continue

    def _pause(self, seconds: float) -> None:
        if self.inbox.stops:
            sys.exit(0)  # whoever is left has been asked to stop too
        self.inbox.wait(seconds)
