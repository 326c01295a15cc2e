"""Builds the heartbeat of a user command from the progress that it posted or printed."""

from __future__ import annotations

from finetune_supervisor import contract
from finetune_supervisor.contract import Node
from finetune_supervisor.liveness.heartbeat import Heartbeat
from finetune_supervisor.messages import TrainingProgress


class CommandHeartbeatBuilder:
    """Builds heartbeats of local rank 0, with the time of the first step in this attempt."""

    def __init__(self, node: Node) -> None:
        self._rank = node.to_global_rank(0)
        # The first reported step may be that of a resumed checkpoint, so only a later step proves progress.
        self._first_reported_step: int | None = None
        self._first_step_time: float | None = None

    def build(self, progress: TrainingProgress, *, now: float) -> Heartbeat:
        """Return the heartbeat for this progress; `now` is in seconds since the epoch."""
        if self._first_reported_step is None:
            self._first_reported_step = progress.step
        if self._first_step_time is None and progress.step > self._first_reported_step:
            self._first_step_time = now
        return Heartbeat(
            self._rank,
            local_rank=0,
            pid=None,
            time=now,
            phase=contract.TRAIN,
            first_step_time=self._first_step_time,
            progress=progress,
        )
