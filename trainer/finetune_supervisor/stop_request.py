"""State machine of a stop: what to do next, given stop signals, the phase of the ranks and the time; no I/O."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from finetune_supervisor.contract import INIT, LOAD

SIGKILL_DELAY_SECONDS = 3.0  # after SIGTERM
_BEFORE_TRAINING = ("", INIT, LOAD)


class StopAction(Enum):
    """What the supervisor does to its program in one step of a stop."""

    FORWARD = "send the command SIGTERM, so that it saves"
    SAVE = "request a checkpoint from the ranks"
    TERMINATE = "send SIGTERM without waiting for a checkpoint"
    KILL = "send SIGKILL"


@dataclass(frozen=True)
class StopRequest:
    """State of a stop; times are seconds of a monotonic clock.

    `grace_seconds` is the time between SIGTERM and the kubelet's SIGKILL. `reason` is empty until the program is ended
    without waiting for a checkpoint.
    """

    grace_seconds: float
    requested_at: float | None = None
    terminated_at: float | None = None
    reason: str = ""

    @property
    def is_requested(self) -> bool:
        """Whether a stop signal arrived while the program ran."""
        return self.requested_at is not None

    def advance(
        self, *, signals: int, phase: str, is_command: bool, now: float
    ) -> tuple[StopRequest, tuple[StopAction, ...]]:
        """Return the next state and the actions to perform, in order; `signals`: stop signals received so far."""
        stop = self
        actions: list[StopAction] = []
        # First signal: let the program save, unless it has nothing to save yet.
        if signals and not stop.is_requested:
            stop = replace(stop, requested_at=now)
            if is_command:
                actions.append(StopAction.FORWARD)
            elif phase in _BEFORE_TRAINING:
                stop = replace(stop, reason="stopped before training began")
            else:
                actions.append(StopAction.SAVE)
        # Second signal, or grace period over: end without saving.
        if not stop.reason:
            stop = replace(stop, reason=stop._forced_stop_reason(signals=signals, now=now))
        # SIGTERM, then SIGKILL until the program has ended.
        if stop.reason and stop.terminated_at is None:
            stop = replace(stop, terminated_at=now)
            actions.append(StopAction.TERMINATE)
        if stop.terminated_at is not None and now > stop.terminated_at + SIGKILL_DELAY_SECONDS:
            actions.append(StopAction.KILL)
        return stop, tuple(actions)

    def _forced_stop_reason(self, *, signals: int, now: float) -> str:
        if signals > 1:
            return "stopped by a second signal; no checkpoint was saved"
        limit_seconds = self.grace_seconds - min(5.0, self.grace_seconds / 2)
        if self.requested_at is None or now <= self.requested_at + limit_seconds:
            return ""
        return f"the ranks did not end within the grace period of {self.grace_seconds:.0f}s (FINETUNE_GRACE_SECONDS)"
