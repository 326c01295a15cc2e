"""Helpers for end-to-end tests: short training settings and access to checkpoints in the output folder."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from testing.processes.operator_stack import OperatorInstallation


def build_training_fields(*, max_steps: int, save_steps: int = 100_000, **fields: Any) -> dict[str, Any]:
    """Return `spec.training` of a short job with an effective batch of 8."""
    return {"globalBatchSize": 8, "learningRate": 0.01, "maxSteps": max_steps, "saveSteps": save_steps, **fields}


def find_last_checkpoint_step(installation: OperatorInstallation, job: str) -> int:
    """Return the step of the newest complete checkpoint, or 0 without one."""
    folder = installation.get_output_folder(job) / "checkpoints"
    steps = [int(path.parent.name.removeprefix("step-")) for path in folder.glob("step-*/manifest.json")]
    return max(steps, default=0)


def wait_for_checkpoint(
    installation: OperatorInstallation, job: str, *, after: int = 0, timeout_seconds: float = 150
) -> int:
    """Wait for a checkpoint newer than the given step and return its step.

    Raises:
        TimeoutError: no such checkpoint was saved in time.
    """
    deadline = time.monotonic() + timeout_seconds
    while (step := find_last_checkpoint_step(installation, job)) <= after:
        if time.monotonic() > deadline:
            description = installation.kubectl("describe", "ftj", job)
            raise TimeoutError(f"{job}: no checkpoint after step {after} within {timeout_seconds:.0f} s\n{description}")
        time.sleep(0.1)
    return step
