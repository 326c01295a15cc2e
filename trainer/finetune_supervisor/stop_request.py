"""State machine that decides how to stop the program of a node, without I/O."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from finetune_supervisor.contract import INIT, LOAD

SIGKILL_DELAY_SECONDS = 3.0  # delay between SIGTERM and SIGKILL
_PHASES_BEFORE_TRAINING = ("", INIT, LOAD)


class StopAction(Enum):
    """Action of the supervisor while it stops its program."""

    FORWARD = "forward SIGTERM to the command, so that it can save"
    SAVE = "request a checkpoint from the ranks"
    TERMINATE = "send SIGTERM without waiting for a checkpoint"
    KILL = "send SIGKILL"


@dataclass(frozen=True)
class StopRequest:
    """State of a stop request; times are in seconds of a monotonic clock.

    `grace_seconds`: time between SIGTERM and the kubelet's SIGKILL. `reason`: why the program is terminated without
    waiting for a checkpoint; otherwise empty.
    """

    grace_seconds: float
    requested_at: float | None = None
    terminated_at: float | None = None
    reason: str = ""

    @property
    def is_requested(self) -> bool:
        """Whether a stop signal has arrived."""
        return self.requested_at is not None

    def advance(
        self, *, signal_count: int, phase: str, is_command: bool, now: float
    ) -> tuple[StopRequest, tuple[StopAction, ...]]:
        """Return the next state and the actions to perform in order.

        `signal_count`: number of stop signals received so far.
        """
        stop = self
        actions: list[StopAction] = []
        # On the first signal, request a checkpoint if training has started.
        if signal_count and not stop.is_requested:
            stop = replace(stop, requested_at=now)
            if is_command:
                actions.append(StopAction.FORWARD)
            elif phase in _PHASES_BEFORE_TRAINING:
                stop = replace(stop, reason="stopped before training began")
            else:
                actions.append(StopAction.SAVE)
        # On a second signal, or shortly before the grace period ends, terminate the program without saving.
        if not stop.reason:
            stop = replace(stop, reason=stop._find_forced_stop_reason(signal_count=signal_count, now=now))
        # Send SIGTERM once, then SIGKILL until the program has ended.
        if stop.reason and stop.terminated_at is None:
            stop = replace(stop, terminated_at=now)
            actions.append(StopAction.TERMINATE)
        if stop.terminated_at is not None and now > stop.terminated_at + SIGKILL_DELAY_SECONDS:
            actions.append(StopAction.KILL)
        return stop, tuple(actions)

    def _find_forced_stop_reason(self, *, signal_count: int, now: float) -> str:
        if signal_count > 1:
            return "stopped by a second signal; no checkpoint was saved"
        limit_seconds = self.grace_seconds - min(5.0, self.grace_seconds / 2)
        if self.requested_at is None or now <= self.requested_at + limit_seconds:
            return ""
        return f"the ranks did not end within the grace period of {self.grace_seconds:.0f}s (FINETUNE_GRACE_SECONDS)"
