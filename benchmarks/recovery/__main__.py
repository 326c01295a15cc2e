"""Entry point of `make bench-recovery`, which measures how fast a job starts and recovers from a killed rank.

Two real pods with two ranks each run a bare torch DDP loop (`ddp.py`), with images that are already on the Kubernetes
nodes. The loop is started alternately by our launcher and by torchrun as the command of the job. SIGKILL is sent to
one rank of the second node. All times come from one clock, because Kubernetes nodes are network namespaces of one host.
With `--peer`, Kubeflow Trainer and JobSet run the same loop under torchrun on the same cluster, in alternation, because
the speed of a host varies.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sys
import time
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from secrets import token_hex

from benchmarks.kubeflow.managers import install_managers
from benchmarks.recovery.stages import (
    RECOVERED,
    STARTED,
    StageSeconds,
    StageTimes,
    StartAndRecovery,
    append_stage_seconds,
    compute_stage_seconds,
    summarise_figures,
)
from benchmarks.recovery.trainjob import TrainJob, build_recovery_runtime
from benchmarks.table import render_table
from testing.builders.jobs import command
from testing.cluster.fault_injection import Chaos
from testing.cluster.images.project_images import get_image_name
from testing.cluster.provider import ThrowawayProvider
from testing.cluster.throwaway import ThrowawayCluster
from testing.faults.job_under_test import JobUnderTest, RawBody, wait_until_settled
from testing.faults.run import delete_job
from testing.faults.training_job import request_finish
from testing.processes.operator_stack import OperatorInstallation, build_example_job

PROGRAM_FOLDER = "/data/recovery"  # mount path of the program in the pods
STEPS_BEFORE_KILL = 20
PROGRAMS: dict[str, RawBody] = {"script": {"script": "ddp.py"}, "exec: torchrun": {"exec": ["torchrun", "ddp.py"]}}
_STAGE_LINE = re.compile(r"^(imported|joined|step 1) at ([\d.]+)$", re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Measure how long a job does not train after one of its ranks is killed."
    )
    parser.add_argument("--rounds", type=int, default=5, help="number of jobs, run one after the other (default 5)")
    parser.add_argument("--keep", action="store_true", help="leave the cluster up")
    parser.add_argument(
        "--peer", action="store_true", help="also measure Kubeflow Trainer and JobSet, which are built first"
    )
    options = parser.parse_args()
    provider = ThrowawayProvider(ThrowawayCluster.from_name())
    installation = OperatorInstallation(provider)
    figures: dict[str, StartAndRecovery] = {title: ({}, {}) for title in PROGRAMS}
    peer: StartAndRecovery = ({}, {})
    try:
        installation.prepare()
        copy_program(installation)
        with install_managers(provider.cluster) if options.peer else nullcontext():
            for _ in range(options.rounds):
                for title, command_fields in PROGRAMS.items():
                    wait_until_settled(installation, provider.cluster)
                    append_stage_seconds(figures[title], measure_recovery(installation, provider.chaos, command_fields))
                if options.peer:
                    append_stage_seconds(peer, measure_peer_recovery(installation, provider.chaos))
    finally:
        if not options.keep:
            provider.down()
    for title, figures_of_program in figures.items():
        tables = (
            render_table(own_figures, summarise_figures(peer_figures))
            for own_figures, peer_figures in zip(figures_of_program, peer, strict=True)
        )
        print(f"\n{title}", *tables, sep="\n\n")
    return 0


def copy_program(installation: OperatorInstallation) -> None:
    """Copy the program to the dataset volume, which the pods mount."""
    folder = installation.get_claim_folder("datasets") / "recovery"
    folder.mkdir(exist_ok=True)
    shutil.copy(Path(__file__).parent / "ddp.py", folder)
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755)


def measure_recovery(
    installation: OperatorInstallation, chaos: Chaos, command_fields: RawBody
) -> tuple[StageSeconds, StageSeconds]:
    """Run one job; return the duration of its start and of its recovery in seconds, in total and by stage."""
    job = JobUnderTest(installation, chaos, f"recovery-{token_hex(2)}")
    job.recorder.start()
    try:
        posted_at = time.time()
        installation.apply(build_example_job(job.name, **build_command_spec(command_fields)))
        job.wait_for_step(STEPS_BEFORE_KILL)
        killed_at = kill_rank(chaos, installation.namespace, job.get_pod_name(1))
        job.wait_until(
            lambda recorder: bool(recorder.steps) and recorder.steps[-1].attempt == 1,
            goal="training again",
            timeout_seconds=120,
        )
        request_finish(job.installation, job.name)
        job.wait_until(lambda recorder: recorder.is_finished, goal="finished", timeout_seconds=120)
        start_stages = compute_stage_seconds(STARTED, posted_at, collect_stage_times(job, 0))
        recovery_stages = compute_stage_seconds(RECOVERED, killed_at, collect_stage_times(job, 1))
        return start_stages, recovery_stages
    finally:
        job.recorder.stop()
        delete_job(job)


def build_command_spec(command_fields: RawBody) -> RawBody:
    """Return the spec fields for the command, with resource requests small enough for both pods to fit on the host."""
    return command(
        {**command_fields, "workingDir": PROGRAM_FOLDER},
        image=get_image_name("trainer"),
        env=[{"name": "OMP_NUM_THREADS", "value": "1"}],
    )


def measure_peer_recovery(installation: OperatorInstallation, chaos: Chaos) -> tuple[StageSeconds, StageSeconds]:
    """Run one TrainJob; return the duration of its start and of its recovery in seconds, in total and by stage."""
    installation.apply(build_recovery_runtime(program=["torchrun", "ddp.py"], folder=PROGRAM_FOLDER))
    job = TrainJob(installation, f"recovery-{token_hex(2)}")
    try:
        posted_at = time.time()
        job.apply()
        pods = job.wait_for_pods(attempt=0)
        start_times = job.wait_for_step(pods.names[0], STEPS_BEFORE_KILL)
        killed_at = kill_rank(chaos, installation.namespace, pods.names[1])
        next_pods = job.wait_for_pods(attempt=1)
        recovery_times = job.wait_for_step(next_pods.names[0], 1)
    finally:
        job.delete()
    return (
        compute_stage_seconds(STARTED, posted_at, StageTimes(pods.created_at, pods.running_at, start_times)),
        compute_stage_seconds(
            RECOVERED, killed_at, StageTimes(next_pods.created_at, next_pods.running_at, recovery_times)
        ),
    )


def kill_rank(chaos: Chaos, namespace: str, pod: str) -> float:
    """Kill a rank; return the time of the signal, which excludes the lookup of the process."""
    processes = chaos.find_rank_processes(namespace, pod)[3]
    killed_at = time.time()
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
    return killed_at


def collect_stage_times(job: JobUnderTest, attempt: int) -> StageTimes:
    """Return the stage times of an attempt, as recorded in the job's status and in the output of its ranks."""
    status = job.recorder.status["attempts"][attempt]
    created_at, running_at = (to_unix_seconds(status[field]) for field in ("startTime", "runningTime"))
    stopped_at = find_stop_time(job) if attempt else None
    return StageTimes(created_at, running_at, read_stage_times(job, attempt=attempt), stopped_at=stopped_at)


def find_stop_time(job: JobUnderTest) -> float:
    """Return the time at which the status first reported that the first attempt had ended."""
    return next(
        change.time
        for change in job.recorder.status_changes
        if any(attempt["state"] in ("Stopping", "Failed") for attempt in change.status.get("attempts", ()))
    )


def read_stage_times(job: JobUnderTest, *, attempt: int) -> dict[str, float]:
    """Read the stage times from the log of the first node; the last rank determines the time of a stage."""
    log = job.output / "logs" / f"attempt-{attempt}" / "node-0.log"
    return {stage: float(unix_time) for stage, unix_time in _STAGE_LINE.findall(log.read_text())}


def to_unix_seconds(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp).timestamp()


if __name__ == "__main__":
    sys.exit(main())
