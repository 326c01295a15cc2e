"""When ranks hang: how long each phase may pass without a sign of life, and which rank holds up the others."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from finetune_supervisor import contract
from finetune_supervisor.liveness.heartbeat import Heartbeat

# In multiples of the limit for a training step. Large models take hours to come down, and as long to go up to the Hub.
_PATIENCE: Mapping[str, float] = {
    contract.INIT: 3,
    contract.LOAD: 72,
    contract.EVAL: 6,
    contract.SAVE: 6,
    contract.PUBLISH: 72,
}
_FIRST_STEP_PATIENCE = 6
_SLOW_STEPS = 5  # a step may take so many times as long as the slowest of a hundred
_STEPS_KEPT = 200
_OWN_PAUSE_SECONDS = 5.0  # after which the supervisor stood still itself, as in a frozen container
_ALMOST = 0.8  # of the limit: who is stopped then was silent for the same reason as those who passed it

# Where a rank stands that waits for others: in a collective, or in a backward pass or a copy that waits for one.
_WAITS = re.compile(
    r"torch/distributed/|/deepspeed/comm/|torch/autograd/(graph|__init__)\.py|torch/cuda/|accelerate/utils/operations"
)
_STOPPED_STATES = {
    "T": "is stopped by a signal (SIGSTOP)",
    "t": "is stopped by a debugger",
    "D": "waits for a device or a file system that does not answer",
    "Z": "is dead, but its launcher has not noticed",
    "": "is gone",
}
STILL = frozenset(_STOPPED_STATES) - {"D"}  # for which waiting does not help, whatever the process was doing


@dataclass(frozen=True)
class Silence:
    """A rank of this node has given no sign of life for too long."""

    local_rank: int
    seconds: float
    limit: float


class Watch:
    """Follows the heartbeats of one node's ranks by a clock that never jumps.

    `limit`: seconds of a step; 0: never. `is_still`: whether a process cannot go on, whatever it was doing.
    """

    def __init__(self, *, limit: float, now: float, is_still: Callable[[int], bool]) -> None:
        self._limit = limit
        self._is_still = is_still
        self.listened = now
        self._heard: dict[int, float] = {}
        self._beats: dict[int, Heartbeat] = {}
        self._stepped: dict[int, float] = {}
        self._steps: deque[float] = deque(maxlen=_STEPS_KEPT)

    def expect(self, ranks: Iterable[int], *, now: float) -> None:
        """From now on they are to give a sign of life; before, the launcher says how long they wait for other nodes."""
        for rank in ranks:
            self._heard.setdefault(rank, now)

    def listen(self, beats: Iterable[Heartbeat], *, now: float) -> None:
        """To be called at least every second or so."""
        pause = now - self.listened
        if pause > _OWN_PAUSE_SECONDS:
            self._heard = {rank: heard + pause for rank, heard in self._heard.items()}
            self._stepped.clear()
        self.listened = now
        for beat in beats:
            before = self._beats.get(beat.local_rank)
            if before is not None and before.time == beat.time:
                continue
            self._heard[beat.local_rank] = now
            self._beats[beat.local_rank] = beat
            self._measure(before, beat, now=now)

    def _measure(self, before: Heartbeat | None, beat: Heartbeat, *, now: float) -> None:
        """Seconds per step, of steps that held no evaluation and no checkpoint."""
        rank = beat.local_rank
        if beat.phase != contract.TRAIN or before is None or before.phase != contract.TRAIN:
            self._stepped.pop(rank, None)
            return
        done = beat.progress.step - before.progress.step
        if done > 0:
            if rank in self._stepped:
                self._steps.append((now - self._stepped[rank]) / done)
            self._stepped[rank] = now

    def silence(self, *, now: float) -> Silence | None:
        """Of the rank that has been silent for longest, measured by what its phase may take; None if none hangs."""
        found = self._most_silent(now)
        return found if found and found.seconds > found.limit else None

    def nearly(self, *, now: float) -> Silence | None:
        """The same, a little earlier: for a node that is stopped because another has seen it first."""
        found = self._most_silent(now)
        return found if found and found.seconds > _ALMOST * found.limit else None

    def silent_seconds(self, local_rank: int, *, now: float) -> float:
        return now - self._heard.get(local_rank, now)

    def _most_silent(self, now: float) -> Silence | None:
        if not self._limit:
            return None
        silences = (
            Silence(rank, now - heard, self._limit_of(rank, now - heard)) for rank, heard in self._heard.items()
        )
        return max(silences, key=lambda silence: silence.seconds / silence.limit, default=None)

    def _limit_of(self, rank: int, silent_seconds: float) -> float:
        beat = self._beats.get(rank)
        if beat is None:
            return self._limit * _PATIENCE[contract.INIT]
        if silent_seconds > self._limit and beat.pid is not None and self._is_still(beat.pid):
            return self._limit
        if beat.phase != contract.TRAIN:
            return self._limit * _PATIENCE.get(beat.phase, 1)
        if beat.progress.step == beat.first_step:
            return self._limit * _FIRST_STEP_PATIENCE
        return max(self._limit, _SLOW_STEPS * self._slow_step)

    @property
    def _slow_step(self) -> float:
        """The 99th percentile."""
        ordered = sorted(self._steps)
        return ordered[math.ceil(0.99 * len(ordered)) - 1] if ordered else 0.0


@dataclass(frozen=True)
class StuckRank:
    """What could be seen of one rank while it was silent."""

    local_rank: int
    rank: int
    silent_seconds: float
    phase: str
    step: int
    state: str  # a letter of /proc/PID/stat; empty: no such process
    kernel: str  # the function it sleeps in, where the kernel tells
    stack: tuple[str, ...]  # the main thread's, innermost first; empty: it did not answer

    @property
    def waits(self) -> bool:
        """For another rank, as far as its stack tells."""
        return any(_WAITS.search(frame) for frame in self.stack[:3])

    @property
    def stands_out(self) -> bool:
        return self.state in _STOPPED_STATES or not self.waits

    @property
    def explanation(self) -> str:
        """`rank 3 is stopped by a signal (SIGSTOP)`."""
        if self.state in _STOPPED_STATES:
            where = f", in {self.kernel}" if self.kernel and self.state == "D" else ""
            return f"rank {self.rank} {_STOPPED_STATES[self.state]}{where}"
        if not self.stack:
            return f"rank {self.rank} does not answer"
        return f"rank {self.rank} {'waits for others' if self.waits else 'stands'} in {self.stack[0]}"


def choose_odd(ranks: Iterable[StuckRank]) -> StuckRank:
    """The rank that most likely holds up the others: one that is not waiting for them, else the longest silent."""
    return min(ranks, key=lambda rank: (rank.state not in _STOPPED_STATES, rank.waits, -rank.silent_seconds))


def parse_stack(dump: str) -> tuple[str, ...]:
    """The main thread's frames in what faulthandler wrote, innermost first: `file.py:12 in name`.

    faulthandler lists the main thread last (https://docs.python.org/3/library/faulthandler.html).
    """
    frames: list[str] = []
    for line in dump.splitlines():
        if "(most recent call first)" in line:
            frames = []
        elif found := re.match(r'  File "(.+)", line (\d+) in (.+)', line):
            frames.append(f"{found[1]}:{found[2]} in {found[3]}")
    return tuple(frames)


def explain_hang(ranks: Sequence[StuckRank], silence: Silence) -> tuple[StuckRank | None, str]:
    """The rank to be blamed, if there is anything to be seen of any, and what to say."""
    waited = f"no sign of life for {silence.seconds:.0f} s (limit {silence.limit:.0f} s)"
    if not ranks:  # none has begun, or it is a program of the user's own
        return None, waited
    odd = choose_odd(ranks)
    where = f"in phase {odd.phase}" + (f" after step {odd.step}" if odd.phase == contract.TRAIN else "")
    others = [rank.explanation for rank in ranks if rank is not odd]
    return odd, f"{odd.explanation}: {waited} {where}" + (f"; {'; '.join(others[:3])}" if others else "")
