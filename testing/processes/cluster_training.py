"""What end-to-end tests say about training: short settings, checkpoints and losses as they lie in the output."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from testing.processes.operator_stack import Stack


def training(*, max_steps: int, save_steps: int = 100_000, **fields: Any) -> dict[str, Any]:
    """`spec.training` of a short run: effective batch 8 on 2 x 2 ranks."""
    return {"globalBatchSize": 8, "learningRate": 0.01, "maxSteps": max_steps, "saveSteps": save_steps, **fields}


def last_checkpoint(stack: Stack, job: str) -> int:
    """Step of the newest whole checkpoint; 0 if there is none."""
    folder = stack.output(job) / "checkpoints"
    steps = [int(path.parent.name.removeprefix("step-")) for path in folder.glob("step-*/manifest.json")]
    return max(steps, default=0)


def wait_for_checkpoint(stack: Stack, job: str, *, after: int = 0, timeout_seconds: float = 150) -> int:
    """The step of the newest checkpoint, as soon as there is one after that step."""
    deadline = time.monotonic() + timeout_seconds
    while (step := last_checkpoint(stack, job)) <= after:
        if time.monotonic() > deadline:
            shown = stack.kubectl("describe", "ftj", job)
            raise TimeoutError(f"{job}: no checkpoint after step {after} within {timeout_seconds:.0f} s\n{shown}")
        time.sleep(0.1)
    return step
