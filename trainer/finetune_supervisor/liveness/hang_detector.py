"""Detects hanging ranks by their heartbeats and finds the rank that blocks the others (decisions/211)."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from finetune_supervisor import contract
from finetune_supervisor.liveness.heartbeat import Heartbeat

# Time limit per phase, as a multiple of the limit of a training step. Transfers of large models take hours.
_PHASE_FACTORS: Mapping[str, float] = {
    contract.INIT: 3,
    contract.LOAD: 72,
    contract.EVAL: 6,
    contract.SAVE: 6,
    contract.PUBLISH: 72,
}
_BUSY_LOAD_FACTOR = 12  # for a loading rank that computes, without a transfer and without a heartbeat
_BUSY_FRACTION = 0.5  # share of computation that a rank does not reach if it waits for storage or for other ranks
_MIN_TRANSFER_BYTES = 2**20  # more than heartbeats and polls of a rank that makes no progress
_FIRST_STEP_FACTOR = 6
_SLOW_STEP_FACTOR = 5  # minimum limit as a multiple of the 99th percentile of recent step times
_MAX_RECENT_STEPS = 200
_SUPERVISOR_PAUSE_SECONDS = 5.0  # a longer gap between calls means that the supervisor was suspended
_NEAR_TIMEOUT_FRACTION = 0.8  # after a stop signal, a rank counts as hanging beyond this fraction of its limit

# Stack frames that show that a rank waits for other ranks, in a collective or in a call that waits for one.
_WAITING_FRAMES = re.compile(
    r"torch/distributed/|/deepspeed/comm/|torch/autograd/(graph|__init__)\.py|torch/cuda/|accelerate/utils/operations"
)
# A frame of the main thread that waits for the thread that saves a checkpoint, and a frame of that thread.
_WAIT_FOR_SAVE = re.compile(r"finetune_trainer/training/checkpoint_saver\.py:\d+ in wait$")
_SAVE = re.compile(r"finetune_trainer/training/checkpoint_saver\.py:\d+ in _run$")
_BLOCKED_STATES = {
    "T": "is stopped by a signal (SIGSTOP)",
    "t": "is stopped by a debugger",
    "D": "waits for a device or a file system that does not respond",
    "Z": "has ended, but its launcher has not noticed",
    "": "has disappeared",
}
_ENDED_STATES = ("Z", "")
_LAUNCHER_REPORT_SECONDS = 10.0  # time in which a launcher notices and reports that a rank has ended
ReadActivity = Callable[[int], "tuple[int, float] | None"]
STOPPED_OR_DEAD_STATES = frozenset(_BLOCKED_STATES) - {"D"}  # states in which a process cannot continue


@dataclass(frozen=True)
class HeartbeatTimeout:
    """Timeout of a rank whose last heartbeat is older than the limit of its phase."""

    local_rank: int
    silent_seconds: float
    limit_seconds: float


class HangDetector:
    """Tracks the heartbeats of one node's ranks; `now` arguments are seconds of a monotonic clock.

    `limit_seconds`: time limit of one step, 0 disables detection. `is_stopped`: returns whether the process with a PID
    cannot continue. `read_activity`: returns the bytes that it has read and written, and the seconds of CPU time that
    it has used, or None if they are unknown.
    """

    def __init__(
        self, *, limit_seconds: float, now: float, is_stopped: Callable[[int], bool], read_activity: ReadActivity
    ) -> None:
        self._limit = limit_seconds
        self._is_stopped = is_stopped
        self._read_activity = read_activity
        self.recorded_at = now
        self._last_heartbeat_at: dict[int, float] = {}
        self._heartbeats: dict[int, Heartbeat] = {}
        self._progress_activity: dict[int, tuple[int, float]] = {}  # of loading ranks at their last progress
        self._last_step_at: dict[int, float] = {}
        self._step_seconds: deque[float] = deque(maxlen=_MAX_RECENT_STEPS)

    def expect_heartbeats(self, local_ranks: Iterable[int], *, now: float) -> None:
        """Apply time limits to these local ranks from now on.

        Before the ranks start, the launcher applies its own timeout.
        """
        for rank in local_ranks:
            self._last_heartbeat_at.setdefault(rank, now)

    def record_heartbeats(self, heartbeats: Iterable[Heartbeat], *, now: float) -> None:
        """Record the current heartbeats; must be called about once per second."""
        pause = now - self.recorded_at
        if pause > _SUPERVISOR_PAUSE_SECONDS:
            self._last_heartbeat_at = {rank: at + pause for rank, at in self._last_heartbeat_at.items()}
            self._last_step_at.clear()
        self.recorded_at = now
        for heartbeat in heartbeats:
            previous_heartbeat = self._heartbeats.get(heartbeat.local_rank)
            is_new = previous_heartbeat is None or previous_heartbeat.time != heartbeat.time
            if heartbeat.phase == contract.LOAD and heartbeat.pid is not None:
                self._record_activity(heartbeat.local_rank, heartbeat.pid, is_new=is_new, now=now)
            if not is_new:
                continue
            self._last_heartbeat_at[heartbeat.local_rank] = now
            self._heartbeats[heartbeat.local_rank] = heartbeat
            self._measure_step(previous_heartbeat, heartbeat, now=now)

    def _record_activity(self, rank: int, pid: int, *, is_new: bool, now: float) -> None:
        """Record the progress of a loading rank: a heartbeat, or a transfer, which counts as one."""
        if activity := self._read_activity(pid):
            transferred_bytes, _ = self._progress_activity.setdefault(rank, activity)
            if is_new or activity[0] - transferred_bytes >= _MIN_TRANSFER_BYTES:
                self._progress_activity[rank] = activity
                self._last_heartbeat_at[rank] = now

    def _measure_step(self, previous_heartbeat: Heartbeat | None, heartbeat: Heartbeat, *, now: float) -> None:
        """Measure the seconds per step between two heartbeats, unless an evaluation or a checkpoint was in between."""
        rank = heartbeat.local_rank
        if (
            heartbeat.phase != contract.TRAIN
            or previous_heartbeat is None
            or previous_heartbeat.phase != contract.TRAIN
        ):
            self._last_step_at.pop(rank, None)
            return
        steps = heartbeat.progress.step - previous_heartbeat.progress.step
        if steps > 0:
            if rank in self._last_step_at:
                self._step_seconds.append((now - self._last_step_at[rank]) / steps)
            self._last_step_at[rank] = now

    def find_timeout(self, *, now: float) -> HeartbeatTimeout | None:
        """Return the timeout of the rank that exceeds its limit by the largest factor, or None."""
        timeout = self._find_longest_silence(now)
        return timeout if timeout and timeout.silent_seconds > timeout.limit_seconds else None

    def find_near_timeout(self, *, now: float) -> HeartbeatTimeout | None:
        """Return the timeout of a rank that has used more than 80 % of its limit, or None.

        After a stop signal, such a rank counts as hanging, because another node may have detected the same hang first.
        """
        timeout = self._find_longest_silence(now)
        return timeout if timeout and timeout.silent_seconds > _NEAR_TIMEOUT_FRACTION * timeout.limit_seconds else None

    def get_silent_seconds(self, local_rank: int, *, now: float) -> float:
        """Return the seconds since the last heartbeat of a local rank."""
        return now - self._last_heartbeat_at.get(local_rank, now)

    def _find_longest_silence(self, now: float) -> HeartbeatTimeout | None:
        if not self._limit:
            return None
        timeouts = (
            HeartbeatTimeout(rank, now - at, self._get_limit_seconds(rank, now - at))
            for rank, at in self._last_heartbeat_at.items()
        )
        return max(timeouts, key=lambda timeout: timeout.silent_seconds / timeout.limit_seconds, default=None)

    def _get_limit_seconds(self, rank: int, silent_seconds: float) -> float:
        heartbeat = self._heartbeats.get(rank)
        if heartbeat is None:
            return self._limit * _PHASE_FACTORS[contract.INIT]
        if silent_seconds > self._limit and heartbeat.pid is not None and self._is_stopped(heartbeat.pid):
            return self._limit
        if heartbeat.phase == contract.LOAD and rank in self._progress_activity and heartbeat.pid is not None:
            _, cpu_seconds = self._read_activity(heartbeat.pid) or (0, 0.0)
            if cpu_seconds - self._progress_activity[rank][1] > _BUSY_FRACTION * silent_seconds:
                return self._limit * _BUSY_LOAD_FACTOR
        if heartbeat.phase != contract.TRAIN:
            return self._limit * _PHASE_FACTORS.get(heartbeat.phase, 1)
        if heartbeat.progress.step == heartbeat.first_step:
            return self._limit * _FIRST_STEP_FACTOR
        return max(self._limit, _SLOW_STEP_FACTOR * self._p99_step_seconds)

    @property
    def _p99_step_seconds(self) -> float:
        """99th percentile of the recent seconds per step."""
        sorted_seconds = sorted(self._step_seconds)
        return sorted_seconds[math.ceil(0.99 * len(sorted_seconds)) - 1] if sorted_seconds else 0.0


@dataclass(frozen=True)
class InspectedRank:
    """Process state and stack of a rank, inspected after a heartbeat timeout on its node."""

    local_rank: int
    rank: int
    silent_seconds: float
    phase: str
    step: int
    state: str  # state letter in /proc/PID/stat; empty if the process does not exist
    kernel_function: str  # kernel function in which the process sleeps; empty if unknown
    stack: tuple[str, ...]  # frames of the main thread, innermost first; empty if the rank wrote no dump

    @property
    def is_waiting(self) -> bool:
        """Whether the stack shows a wait for other ranks."""
        return any(_WAITING_FRAMES.search(frame) for frame in self.stack[:3])

    @property
    def is_suspicious(self) -> bool:
        """Whether the rank probably blocks the others instead of waiting for them."""
        return self.state in _BLOCKED_STATES or not self.is_waiting

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended, which its launcher reports soon."""
        return self.state in _ENDED_STATES

    @property
    def explanation(self) -> str:
        """Description of the rank's state, such as `rank 3 is stopped by a signal (SIGSTOP)`."""
        if self.state in _BLOCKED_STATES:
            function = f", in {self.kernel_function}" if self.kernel_function and self.state == "D" else ""
            return f"rank {self.rank} {_BLOCKED_STATES[self.state]}{function}"
        if not self.stack:
            return f"rank {self.rank} does not respond"
        return f"rank {self.rank} {'waits for other ranks' if self.is_waiting else 'is'} in {self.stack[0]}"


def find_suspect_rank(ranks: Iterable[InspectedRank]) -> InspectedRank:
    """Return the rank that most likely blocks the others.

    Ranks that do not wait for others come first, then the rank with the oldest heartbeat.
    """
    return min(ranks, key=lambda rank: (rank.state not in _BLOCKED_STATES, rank.is_waiting, -rank.silent_seconds))


def may_be_reported_by_launcher(ranks: Iterable[InspectedRank], timeout: HeartbeatTimeout) -> bool:
    """Return whether a rank has ended so recently that its launcher will report its error, which is not a hang.

    If the ranks of another node hang, ranks of this node may end by a lost connection at the time of their own timeout.
    """
    is_recent = timeout.silent_seconds < timeout.limit_seconds + _LAUNCHER_REPORT_SECONDS
    return is_recent and any(rank.has_ended for rank in ranks)


def parse_stack(dump: str) -> tuple[str, ...]:
    """Return the frames of the main thread in a faulthandler dump, innermost first, as `file.py:12 in name`.

    If the main thread waits for a checkpoint, return the frames of the thread that saves it.
    faulthandler prints the main thread last (https://docs.python.org/3/library/faulthandler.html).
    """
    threads: list[list[str]] = [[]]
    for line in dump.splitlines():
        if "(most recent call first)" in line:
            threads.append([])
        elif match := re.match(r'  File "(.+)", line (\d+) in (.+)', line):
            threads[-1].append(f"{match[1]}:{match[2]} in {match[3]}")
    frames = threads[-1]
    if any(_WAIT_FOR_SAVE.search(frame) for frame in frames):
        frames = next((thread for thread in threads if any(_SAVE.search(frame) for frame in thread)), frames)
    return tuple(frames)


def explain_hang(ranks: Sequence[InspectedRank], timeout: HeartbeatTimeout) -> tuple[InspectedRank | None, str]:
    """Return the suspect rank and the failure message; the rank is None if the state of all ranks is unknown."""
    silence = f"no heartbeat for {timeout.silent_seconds:.0f} s (limit {timeout.limit_seconds:.0f} s)"
    if not ranks:  # no rank has started, or a user command reports only progress
        return None, silence
    suspect = find_suspect_rank(ranks)
    phase = f"in phase {suspect.phase}" + (f" after step {suspect.step}" if suspect.phase == contract.TRAIN else "")
    others = [rank.explanation for rank in ranks if rank is not suspect]
    return suspect, f"{suspect.explanation}: {silence} {phase}" + (f"; {'; '.join(others[:3])}" if others else "")
