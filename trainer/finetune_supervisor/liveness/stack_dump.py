"""Inspects the ranks of a node by their process states in /proc and by stack dumps that they write on a signal."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from finetune_supervisor.contract import RunFolder
from finetune_supervisor.liveness.hang_detector import STOPPED_OR_DEAD_STATES, InspectedRank, parse_stack
from finetune_supervisor.liveness.heartbeat import Heartbeat

DUMP_SIGNAL = signal.SIGUSR1
_DUMP_TIMEOUT_SECONDS = 2.0


def register_stack_dump(run_folder: RunFolder, local_rank: int) -> None:
    """Register a signal handler that dumps the stacks of this rank, even inside a collective that never returns."""
    run_folder.stack_dumps.mkdir(parents=True, exist_ok=True)
    file = _get_dump_file(run_folder, local_rank).open("ab", buffering=0)  # must stay open until the process exits
    faulthandler.register(DUMP_SIGNAL, file=file, all_threads=True)


def request_stack_dumps(run_folder: RunFolder, pids: Iterable[tuple[int, int]]) -> dict[int, str]:
    """Return the stack dumps by local rank; `pids` are pairs of local rank and PID.

    The dump of a stopped process is empty.
    """
    requested_dumps = []
    for local_rank, pid in pids:
        path = _get_dump_file(run_folder, local_rank)
        with contextlib.suppress(OSError):
            os.truncate(path, 0)  # raises OSError for a rank without a handler, which the signal would kill
            os.kill(pid, DUMP_SIGNAL)
            requested_dumps.append((local_rank, path))
    deadline = time.monotonic() + _DUMP_TIMEOUT_SECONDS
    while time.monotonic() < deadline and not all(path.stat().st_size for _, path in requested_dumps):
        time.sleep(0.05)
    time.sleep(0.1)  # time for the last rank to finish its dump
    return {local_rank: path.read_text(encoding="utf-8", errors="replace") for local_rank, path in requested_dumps}


def inspect_ranks(
    run_folder: RunFolder, heartbeats: Sequence[Heartbeat], silent_seconds: dict[int, float]
) -> tuple[InspectedRank, ...]:
    """Return state and stack of every rank that has sent a heartbeat; keys of `silent_seconds` are local ranks."""
    pids = {heartbeat.local_rank: heartbeat.pid for heartbeat in heartbeats if heartbeat.pid is not None}
    first_states = {local_rank: read_process_state(pid) for local_rank, pid in pids.items()}
    stacks = request_stack_dumps(run_folder, pids.items())
    second_states = {local_rank: read_process_state(pid) for local_rank, pid in pids.items()}
    return tuple(
        InspectedRank(
            local_rank=heartbeat.local_rank,
            rank=heartbeat.rank,
            silent_seconds=silent_seconds[heartbeat.local_rank],
            phase=heartbeat.phase,
            step=heartbeat.progress.step,
            state=_choose_process_state(first_states[heartbeat.local_rank], second_states[heartbeat.local_rank]),
            kernel_function=read_kernel_function(pids[heartbeat.local_rank]),
            stack=parse_stack(stacks.get(heartbeat.local_rank, "")),
        )
        for heartbeat in heartbeats
        if heartbeat.local_rank in pids
    )


def _choose_process_state(first_state: str, second_state: str) -> str:
    """Return the first state, or the second if the first is D, because short uninterruptible waits are normal."""
    return second_state if first_state == "D" else first_state


def read_process_state(pid: int, proc_folder: Path = Path("/proc")) -> str:
    """Return the state letter of a process, such as R, S, D, T or Z; empty if it does not exist, `?` without /proc."""
    if not proc_folder.is_dir():
        return "?"
    try:
        text = (proc_folder / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]  # the preceding process name may contain spaces and parentheses


def is_stopped_or_dead(pid: int) -> bool:
    """Return whether the process is stopped or dead, so that it cannot continue."""
    return read_process_state(pid) in STOPPED_OR_DEAD_STATES


def read_activity(pid: int, proc_folder: Path = Path("/proc")) -> tuple[int, float] | None:
    """Return the bytes that a process has read and written, also in mapped files, and its CPU seconds, if known."""
    try:
        counters = dict(line.split(b": ") for line in (proc_folder / str(pid) / "io").read_bytes().splitlines())
        stat = (proc_folder / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    faults, _, user_ticks, system_ticks = map(int, stat.rpartition(b")")[2].split()[9:13])  # faults that read files
    transferred = sum(int(counters[name]) for name in (b"rchar", b"wchar", b"read_bytes", b"write_bytes"))
    return transferred + 4096 * faults, (user_ticks + system_ticks) / os.sysconf("SC_CLK_TCK")


def read_kernel_function(pid: int, proc_folder: Path = Path("/proc")) -> str:
    """Return the kernel function in which the process sleeps, empty if unknown."""
    try:
        function = (proc_folder / str(pid) / "wchan").read_text(encoding="utf-8").strip()
    except OSError:
        return ""
    return "" if function == "0" else function


def _get_dump_file(run_folder: RunFolder, local_rank: int) -> Path:
    return run_folder.stack_dumps / f"rank-{local_rank}.txt"
