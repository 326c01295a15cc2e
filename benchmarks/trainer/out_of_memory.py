"""Runs a job whose first micro-batch is too large for the GPU, so that the out-of-memory repair shrinks it."""

import os
import signal
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.trainer.comparison import PYTHON_PATH, REPOSITORY
from benchmarks.trainer.contenders.ours import build_spec
from benchmarks.trainer.task import Task
from testing.processes.local_mode import LocalJob, build_job_body, write_job_file

# On CPU, testing/fakes/inject raises the out-of-memory error.
INJECTED_ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join((str(REPOSITORY / "testing/fakes/inject"), PYTHON_PATH)),
    "OOM_ABOVE_SAMPLES": "1",
    "PASSES_BEFORE_FAULT": "0",
}
TIMEOUT_SECONDS = 1800


class OutOfMemoryRun(NamedTuple):
    """A finished run of a job, with the exit code and output of `finetune run`."""

    job: LocalJob
    exit_code: int
    output: str


def run_out_of_memory_job(task: Task, folder: Path) -> OutOfMemoryRun:
    """Run `finetune run` for three steps."""
    spec: dict[str, Any] = build_spec(task)
    spec["training"] |= {"maxSteps": 3}
    del spec["training"]["numTrainEpochs"]
    environment = {} if task.on_gpu else INJECTED_ENVIRONMENT
    spec["env"] = [{"name": name, "value": value} for name, value in environment.items()]
    job = write_job_file(folder, build_job_body(spec), {})
    process = job.start()
    try:
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
    return OutOfMemoryRun(job, process.returncode, output)


def describe_attempts(job: LocalJob) -> list[str]:
    attempts = [
        f"  attempt {record.attempt}: {record.reason or record.state}: {record.message}"
        for record in job.status.attempts
    ]
    return [*attempts, f"  batch: {job.status.batch}"]
