"""Detects hanging ranks by their heartbeats, and finds the rank that holds up the others (decisions/211)."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from finetune_supervisor import contract
from finetune_supervisor.liveness.heartbeat import Heartbeat

# Multiples of the limit for a training step. Downloading a large model, or uploading it to the Hub, takes hours.
_PHASE_FACTORS: Mapping[str, float] = {
    contract.INIT: 3,
    contract.LOAD: 72,
    contract.EVAL: 6,
    contract.SAVE: 6,
    contract.PUBLISH: 72,
}
_FIRST_STEP_FACTOR = 6
_SLOW_STEP_FACTOR = 5  # times the 99th percentile of recent steps
_RECENT_STEPS = 200
_SUPERVISOR_PAUSE_SECONDS = 5.0  # a longer gap between passes means that the supervisor itself was frozen
_NEAR_TIMEOUT = 0.8  # of the limit; a rank stopped after that hung like those of the nodes that reached the limit

# Frames of a rank that waits for others: a collective, or a backward pass or a copy that waits for one.
_WAITING_FRAMES = re.compile(
    r"torch/distributed/|/deepspeed/comm/|torch/autograd/(graph|__init__)\.py|torch/cuda/|accelerate/utils/operations"
)
_BLOCKED_STATES = {
    "T": "is stopped by a signal (SIGSTOP)",
    "t": "is stopped by a debugger",
    "D": "waits for a device or a file system that does not respond",
    "Z": "has ended, but its launcher has not noticed",
    "": "has disappeared",
}
STOPPED_OR_DEAD_STATES = frozenset(_BLOCKED_STATES) - {"D"}  # such a process will not continue by itself


@dataclass(frozen=True)
class HeartbeatTimeout:
    """A rank of this node that has sent no heartbeat for longer than the limit of its phase."""

    local_rank: int
    silent_seconds: float
    limit_seconds: float


class HangDetector:
    """Tracks the heartbeats of one node's ranks by a monotonic clock; all `now` are its seconds.

    `limit`: seconds for one step, 0 disables detection. `is_stopped`: whether the process with this PID cannot
    continue, whatever it was doing.
    """

    def __init__(self, *, limit: float, now: float, is_stopped: Callable[[int], bool]) -> None:
        self._limit = limit
        self._is_stopped = is_stopped
        self.recorded_at = now
        self._last_heartbeat_at: dict[int, float] = {}
        self._heartbeats: dict[int, Heartbeat] = {}
        self._last_step_at: dict[int, float] = {}
        self._step_seconds: deque[float] = deque(maxlen=_RECENT_STEPS)

    def expect(self, ranks: Iterable[int], *, now: float) -> None:
        """Expect heartbeats of these local ranks from now on; before, the launcher limits the wait for other nodes."""
        for rank in ranks:
            self._last_heartbeat_at.setdefault(rank, now)

    def record(self, beats: Iterable[Heartbeat], *, now: float) -> None:
        """Record the current heartbeats; to be called about once per second."""
        pause = now - self.recorded_at
        if pause > _SUPERVISOR_PAUSE_SECONDS:
            self._last_heartbeat_at = {rank: at + pause for rank, at in self._last_heartbeat_at.items()}
            self._last_step_at.clear()
        self.recorded_at = now
        for beat in beats:
            before = self._heartbeats.get(beat.local_rank)
            if before is not None and before.time == beat.time:
                continue
            self._last_heartbeat_at[beat.local_rank] = now
            self._heartbeats[beat.local_rank] = beat
            self._measure_step(before, beat, now=now)

    def _measure_step(self, before: Heartbeat | None, beat: Heartbeat, *, now: float) -> None:
        """Measure seconds per step between two heartbeats without an evaluation or a checkpoint in between."""
        rank = beat.local_rank
        if beat.phase != contract.TRAIN or before is None or before.phase != contract.TRAIN:
            self._last_step_at.pop(rank, None)
            return
        steps = beat.progress.step - before.progress.step
        if steps > 0:
            if rank in self._last_step_at:
                self._step_seconds.append((now - self._last_step_at[rank]) / steps)
            self._last_step_at[rank] = now

    def find_timeout(self, *, now: float) -> HeartbeatTimeout | None:
        """Return the rank that exceeds its limit by the largest factor, or None if no rank hangs."""
        timeout = self._longest_silence(now)
        return timeout if timeout and timeout.silent_seconds > timeout.limit_seconds else None

    def find_near_timeout(self, *, now: float) -> HeartbeatTimeout | None:
        """Return a rank that is close to its limit, for a node that is stopped because another one timed out first."""
        timeout = self._longest_silence(now)
        return timeout if timeout and timeout.silent_seconds > _NEAR_TIMEOUT * timeout.limit_seconds else None

    def silent_seconds(self, local_rank: int, *, now: float) -> float:
        """Return the seconds since the last heartbeat of a rank."""
        return now - self._last_heartbeat_at.get(local_rank, now)

    def _longest_silence(self, now: float) -> HeartbeatTimeout | None:
        if not self._limit:
            return None
        timeouts = (
            HeartbeatTimeout(rank, now - at, self._limit_of(rank, now - at))
            for rank, at in self._last_heartbeat_at.items()
        )
        return max(timeouts, key=lambda timeout: timeout.silent_seconds / timeout.limit_seconds, default=None)

    def _limit_of(self, rank: int, silent_seconds: float) -> float:
        beat = self._heartbeats.get(rank)
        if beat is None:
            return self._limit * _PHASE_FACTORS[contract.INIT]
        if silent_seconds > self._limit and beat.pid is not None and self._is_stopped(beat.pid):
            return self._limit
        if beat.phase != contract.TRAIN:
            return self._limit * _PHASE_FACTORS.get(beat.phase, 1)
        if beat.progress.step == beat.first_step:
            return self._limit * _FIRST_STEP_FACTOR
        return max(self._limit, _SLOW_STEP_FACTOR * self._slow_step_seconds)

    @property
    def _slow_step_seconds(self) -> float:
        """99th percentile of the seconds per step."""
        ordered = sorted(self._step_seconds)
        return ordered[math.ceil(0.99 * len(ordered)) - 1] if ordered else 0.0


@dataclass(frozen=True)
class StuckRank:
    """State and stack of one rank of a node on which a rank hangs."""

    local_rank: int
    rank: int
    silent_seconds: float
    phase: str
    step: int
    state: str  # a letter of /proc/PID/stat; empty: no such process
    kernel: str  # kernel function in which it sleeps; empty: unknown
    stack: tuple[str, ...]  # of the main thread, innermost first; empty: the rank wrote none

    @property
    def is_waiting(self) -> bool:
        """Whether its stack shows that it waits for other ranks."""
        return any(_WAITING_FRAMES.search(frame) for frame in self.stack[:3])

    @property
    def stands_out(self) -> bool:
        """Whether it is likely to hold up the others, instead of waiting for them."""
        return self.state in _BLOCKED_STATES or not self.is_waiting

    @property
    def explanation(self) -> str:
        """What the rank does, such as `rank 3 is stopped by a signal (SIGSTOP)`."""
        if self.state in _BLOCKED_STATES:
            function = f", in {self.kernel}" if self.kernel and self.state == "D" else ""
            return f"rank {self.rank} {_BLOCKED_STATES[self.state]}{function}"
        if not self.stack:
            return f"rank {self.rank} does not respond"
        return f"rank {self.rank} {'waits for other ranks' if self.is_waiting else 'is'} in {self.stack[0]}"


def find_suspect_rank(ranks: Iterable[StuckRank]) -> StuckRank:
    """Return the rank that most likely holds up the others: one that does not wait for them, or the longest silent."""
    return min(ranks, key=lambda rank: (rank.state not in _BLOCKED_STATES, rank.is_waiting, -rank.silent_seconds))


def parse_stack(dump: str) -> tuple[str, ...]:
    """Return the frames of the main thread in a dump of faulthandler, innermost first, as `file.py:12 in name`.

    faulthandler lists the main thread last (https://docs.python.org/3/library/faulthandler.html).
    """
    frames: list[str] = []
    for line in dump.splitlines():
        if "(most recent call first)" in line:
            frames = []
        elif match := re.match(r'  File "(.+)", line (\d+) in (.+)', line):
            frames.append(f"{match[1]}:{match[2]} in {match[3]}")
    return tuple(frames)


def explain_hang(ranks: Sequence[StuckRank], timeout: HeartbeatTimeout) -> tuple[StuckRank | None, str]:
    """Return the suspect rank, None if the state of no rank is known, and the message of the failure."""
    silence = f"no heartbeat for {timeout.silent_seconds:.0f} s (limit {timeout.limit_seconds:.0f} s)"
    if not ranks:  # no rank has started, or a user's program reports only progress
        return None, silence
    suspect = find_suspect_rank(ranks)
    phase = f"in phase {suspect.phase}" + (f" after step {suspect.step}" if suspect.phase == contract.TRAIN else "")
    others = [rank.explanation for rank in ranks if rank is not suspect]
    return suspect, f"{suspect.explanation}: {silence} {phase}" + (f"; {'; '.join(others[:3])}" if others else "")
