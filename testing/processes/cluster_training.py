"""Helpers for end-to-end tests: short trainings, on the cluster or in one process, and their checkpoints."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from testing.models.loss_curve import read_losses
from testing.processes.operator_stack import OperatorInstallation, build_example_job


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


def train_in_one_process(
    installation: OperatorInstallation, training_fields: dict[str, Any], folder: Path, **fields: Any
) -> dict[int, float]:
    """Train the same spec with one rank in local mode, using gradient accumulation to keep the effective batch."""
    body = build_example_job("single", numNodes=1, nprocPerNode=1, training=training_fields, **fields)
    job_file = folder / "job.yaml"
    job_file.write_text(yaml.safe_dump(body))
    command = [sys.executable, "-m", "finetune_cli", "run", str(job_file), "--output", str(folder / "out")]
    subprocess.run([*command, "--volume", f"data={installation.get_claim_folder('datasets')}"], check=True)
    (output,) = (folder / "out").glob("*/single")
    return read_losses(output)
