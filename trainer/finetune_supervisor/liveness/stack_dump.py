"""Inspects the ranks of a node: process state from /proc, and a stack dump that each rank writes on a signal."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from finetune_supervisor.contract import RunFolder
from finetune_supervisor.liveness.hang_detector import STOPPED_OR_DEAD_STATES, StuckRank, parse_stack
from finetune_supervisor.liveness.heartbeat import Heartbeat

DUMP_SIGNAL = signal.SIGUSR1
_DUMP_TIMEOUT_SECONDS = 2.0


def register_stack_dump(run: RunFolder, local_rank: int) -> None:
    """Make this rank dump its stacks on the signal, also while it is inside a collective that never returns."""
    run.stacks.mkdir(parents=True, exist_ok=True)
    file = _dump_file(run, local_rank).open("ab", buffering=0)  # must stay open for the life of the process
    faulthandler.register(DUMP_SIGNAL, file=file, all_threads=True)


def request_stack_dumps(run: RunFolder, pids: Iterable[tuple[int, int]]) -> dict[int, str]:
    """Return the stack dumps by local rank; `pids` are pairs of local rank and PID. A stopped process writes none."""
    requested = []
    for local_rank, pid in pids:
        path = _dump_file(run, local_rank)
        with contextlib.suppress(OSError):
            os.truncate(path, 0)  # raises if the rank has not registered: the signal would end it
            os.kill(pid, DUMP_SIGNAL)
            requested.append((local_rank, path))
    deadline = time.monotonic() + _DUMP_TIMEOUT_SECONDS
    while time.monotonic() < deadline and not all(path.stat().st_size for _, path in requested):
        time.sleep(0.05)
    time.sleep(0.1)  # let the last rank finish its dump
    return {local_rank: path.read_text(encoding="utf-8", errors="replace") for local_rank, path in requested}


def inspect_ranks(
    run: RunFolder, beats: Sequence[Heartbeat], silent_seconds: dict[int, float]
) -> tuple[StuckRank, ...]:
    """Return state and stack of every rank that has sent a heartbeat; `silent_seconds` is by local rank."""
    pids = {beat.local_rank: beat.pid for beat in beats if beat.pid is not None}
    before = {local_rank: read_process_state(pid) for local_rank, pid in pids.items()}
    stacks = request_stack_dumps(run, pids.items())
    after = {local_rank: read_process_state(pid) for local_rank, pid in pids.items()}
    return tuple(
        StuckRank(
            local_rank=beat.local_rank,
            rank=beat.rank,
            silent_seconds=silent_seconds[beat.local_rank],
            phase=beat.phase,
            step=beat.progress.step,
            state=_lasting_state(before[beat.local_rank], after[beat.local_rank]),
            kernel=read_kernel_function(pids[beat.local_rank]),
            stack=parse_stack(stacks.get(beat.local_rank, "")),
        )
        for beat in beats
        if beat.local_rank in pids
    )


def _lasting_state(before: str, after: str) -> str:
    """Return the state; D counts only if it lasts, since every process waits for a disk at times."""
    return after if before == "D" else before


def read_process_state(pid: int, proc: Path = Path("/proc")) -> str:
    """Return the letter of the process state (R, S, D, T, Z ...); empty: no such process, `?`: no /proc."""
    if not proc.is_dir():
        return "?"
    try:
        text = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]  # the process name before it may contain spaces and parentheses


def is_stopped_or_dead(pid: int) -> bool:
    """Return whether the process cannot continue by itself."""
    return read_process_state(pid) in STOPPED_OR_DEAD_STATES


def read_kernel_function(pid: int, proc: Path = Path("/proc")) -> str:
    """Return the kernel function in which the process sleeps; empty if unknown."""
    try:
        function = (proc / str(pid) / "wchan").read_text(encoding="utf-8").strip()
    except OSError:
        return ""
    return "" if function == "0" else function


def _dump_file(run: RunFolder, local_rank: int) -> Path:
    return run.stacks / f"rank-{local_rank}.txt"
