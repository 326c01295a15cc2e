"""Checks a job that `finetune run` runs, and the resume of a job whose rank was killed."""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.checks.tasks import build_small_spec
from benchmarks.gpu_check.context import CheckContext, require, require_equal_losses
from testing.processes.local_mode import LocalJob, build_job_body, write_job_file

STEPS, SAVE_STEPS, KILL_AT_STEP = 20, 5, 11
TOLERANCE = 0.01  # attention's backward pass is not deterministic on a GPU
LAUNCH = "launch"  # name of the stored losses
_POLL_SECONDS = 0.05


def check_launch(context: CheckContext) -> None:
    """Run a job of 20 steps, and read heartbeats and processes while it runs."""
    started_at = time.monotonic()
    with start_job(context, "launch") as (job, process):
        pid = wait_for_step(job, 1, process)
        context.record(first_step_seconds=time.monotonic() - started_at, **describe_rank_process(pid))
        steps = {read_step(job)}
        while process.poll() is None:
            steps.add(read_step(job))
            time.sleep(_POLL_SECONDS)
        output = process.communicate()[0]
    context.record(total_seconds=time.monotonic() - started_at, heartbeats=len(steps))
    require(process.returncode == 0, f"finetune run ended with {process.returncode}: {output[-500:]}")
    require(len(job.status.attempts) == 1, f"{len(job.status.attempts)} attempts: {job.status.attempts}")
    require(len(steps) > 1, f"all heartbeats reported step {steps}")
    record_log(context, job)
    losses = read_job_losses(job)
    require(len(losses) == STEPS, f"{len(losses)} losses after {STEPS} steps")
    context.store_losses(LAUNCH, losses)
    context.record(losses=[losses[0], losses[-1]])


def check_kill_and_resume(context: CheckContext) -> None:
    """Kill the rank after a checkpoint; the next attempt must resume and reach the same losses."""
    expected = context.load_losses(LAUNCH)
    with start_job(context, "kill") as (job, process):
        os.kill(wait_for_step(job, KILL_AT_STEP, process), signal.SIGKILL)
        killed_at = time.monotonic()
        while read_step(job, attempt=1) < KILL_AT_STEP and process.poll() is None:
            time.sleep(_POLL_SECONDS)
        context.record(recovery_seconds=time.monotonic() - killed_at)
        output = process.communicate()[0]
    require(process.returncode == 0, f"finetune run ended with {process.returncode}: {output[-500:]}")
    attempts = job.status.attempts
    context.record(attempts=[f"{record.reason or record.state}" for record in attempts])
    require(len(attempts) == 2, f"{len(attempts)} attempts instead of 2")
    require(attempts[0].reason == "RankKilled", f"the first attempt ended with {attempts[0].reason}")
    first_step = attempts[1].first_step
    context.record(resumed_from_step=first_step)
    require(first_step and first_step % SAVE_STEPS == 0, f"the second attempt began at step {first_step}")
    context.record(difference=require_equal_losses(read_job_losses(job), expected, tolerance=TOLERANCE))


@contextmanager
def start_job(context: CheckContext, name: str) -> Iterator[tuple[LocalJob, Any]]:
    """Start `finetune run` of a LoRA job with loader processes and the initialisation log of NCCL."""
    folder = context.scratch / name
    spec = build_small_spec(
        context,
        folder,
        steps=STEPS,
        has_lora=True,
        training={"saveSteps": SAVE_STEPS},
        dataset={"numWorkers": 2},
    )
    spec["env"] = [{"name": "NCCL_DEBUG", "value": "INFO"}]
    job = write_job_file(folder / "job", build_job_body(spec), {})
    process = job.start()
    try:
        yield job, process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)


def wait_for_step(job: LocalJob, step: int, process: Any) -> int:
    """Return the pid of the rank when it has completed the step; fail if the job ends before."""
    while process.poll() is None:
        heartbeat = job.read_heartbeat(node_rank=0)
        if heartbeat and heartbeat["progress"]["step"] >= step:
            return int(heartbeat["pid"])
        time.sleep(_POLL_SECONDS)
    raise AssertionError(f"the job ended before step {step}: {process.communicate()[0][-500:]}")


def read_step(job: LocalJob, *, attempt: int = 0) -> int:
    heartbeat = job.read_heartbeat(node_rank=0, attempt=attempt)
    return int(heartbeat["progress"]["step"]) if heartbeat else -1


def describe_rank_process(pid: int) -> dict[str, Any]:
    """Return whether the rank is a fork, and the numbers of native threads of the rank and of its launcher."""
    process = Path(f"/proc/{pid}")
    arguments = (process / "cmdline").read_bytes().split(b"\0")
    status = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines() if ":\t" in line)
    launcher = Path(f"/proc/{status['PPid']}")
    return {
        "rank_is_fork": b"ranks" in arguments,  # an argument of the launcher, which a new interpreter does not have
        "rank_threads": len(list((process / "task").iterdir())),
        "launcher_threads": len(list((launcher / "task").iterdir())),
    }


def record_log(context: CheckContext, job: LocalJob) -> None:
    """Record what the log of the node contains about NCCL, attention and memory."""
    log = (job.output / "logs/attempt-0/node-0.log").read_text(errors="replace")
    lines = [line for line in log.splitlines() if "attention:" in line or "memory per rank" in line]
    context.record(log_lines=lines, nccl_initialised="Init COMPLETE" in log)
    if context.on_gpu:
        require("Init COMPLETE" in log, "NCCL_DEBUG=INFO, but the log contains no `Init COMPLETE` of NCCL")


def read_job_losses(job: LocalJob) -> list[float]:
    history = json.loads((job.output / "result/trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]
