"""What a silent process is doing: its state in the kernel, and the stack that it writes when it is asked."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from finetune_supervisor.contract import RunFolder
from finetune_supervisor.liveness.hang_detector import STILL, StuckRank, parse_stack
from finetune_supervisor.liveness.heartbeat import Heartbeat

ASK = signal.SIGUSR1
_ANSWER_SECONDS = 2.0


def answer_with_stack(run: RunFolder, local_rank: int) -> None:
    """In a rank: from now on the signal is answered, even from inside a collective that never ends."""
    run.stacks.mkdir(parents=True, exist_ok=True)
    file = _file(run, local_rank).open("ab", buffering=0)  # kept open for as long as the process lives
    faulthandler.register(ASK, file=file, all_threads=True)


def ask_for_stacks(run: RunFolder, pids: Iterable[tuple[int, int]]) -> dict[int, str]:
    """By local rank, of those who answer; `pids` are local ranks with their process. A stopped process does not."""
    asked = []
    for local_rank, pid in pids:
        path = _file(run, local_rank)
        with contextlib.suppress(OSError):
            os.truncate(path, 0)  # fails where it has not said that it answers: the signal would end it
            os.kill(pid, ASK)
            asked.append((local_rank, path))
    until = time.monotonic() + _ANSWER_SECONDS
    while time.monotonic() < until and not all(path.stat().st_size for _, path in asked):
        time.sleep(0.05)
    time.sleep(0.1)  # the rest of the last answer
    return {local_rank: path.read_text(encoding="utf-8", errors="replace") for local_rank, path in asked}


def examine(run: RunFolder, beats: Sequence[Heartbeat], silent_seconds: dict[int, float]) -> tuple[StuckRank, ...]:
    """Every rank of the node that has ever given a sign of life."""
    pids = {beat.local_rank: beat.pid for beat in beats if beat.pid is not None}
    before = {local_rank: process_state(pid) for local_rank, pid in pids.items()}
    stacks = ask_for_stacks(run, pids.items())
    after = {local_rank: process_state(pid) for local_rank, pid in pids.items()}
    return tuple(
        StuckRank(
            local_rank=beat.local_rank,
            rank=beat.rank,
            silent_seconds=silent_seconds[beat.local_rank],
            phase=beat.phase,
            step=beat.progress.step,
            state=_lasting(before[beat.local_rank], after[beat.local_rank]),
            kernel=kernel_function(pids[beat.local_rank]),
            stack=parse_stack(stacks.get(beat.local_rank, "")),
        )
        for beat in beats
        if beat.local_rank in pids
    )


def _lasting(before: str, after: str) -> str:
    """Every process waits for a disk now and then."""
    return after if before == "D" else before


def process_state(pid: int, proc: Path = Path("/proc")) -> str:
    """The letter of its state (R, S, D, T, Z ...); empty if there is no such process, `?` where nobody tells."""
    if not proc.is_dir():
        return "?"
    try:
        text = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]  # the name before it may hold anything


def is_still(pid: int) -> bool:
    """Stopped or dead."""
    return process_state(pid) in STILL


def kernel_function(pid: int, proc: Path = Path("/proc")) -> str:
    """Where it sleeps in the kernel; empty where that is not told."""
    try:
        said = (proc / str(pid) / "wchan").read_text(encoding="utf-8").strip()
    except OSError:
        return ""
    return "" if said == "0" else said


def _file(run: RunFolder, local_rank: int) -> Path:
    return run.stacks / f"rank-{local_rank}.txt"
