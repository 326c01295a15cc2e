"""`make bench-recovery`: until a job trains, and after the death of a rank until it trains again, on real pods.

2 nodes x 2 ranks run a bare torch DDP loop (`ddp.py`), with images that are on the machines already: as a script, which
our launcher starts, and in turn with it under a torchrun that the job starts itself.
SIGKILL strikes one rank of the second node. The clock is one: the nodes are network namespaces of this machine.
With `--peer` Kubeflow Trainer and JobSet do the same, under torchrun, on the same cluster: all take turns, because
machines do not keep their speed.
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

from benchmarks.recovery.kubeflow import installed
from benchmarks.recovery.stages import RECOVERED, STARTED, Both, Moments, Stages, by_stage, note, summarise
from benchmarks.recovery.trainjob import TrainJob, make_runtime
from benchmarks.table import render_table
from testing.builders.jobs import command
from testing.cluster.fault_injection import Chaos
from testing.cluster.images.project_images import image_name
from testing.cluster.provider import ThrowawayProvider
from testing.cluster.throwaway import ThrowawayCluster
from testing.faults.job_under_test import Raw, Scene, settle
from testing.faults.run import remove
from testing.processes.operator_stack import Stack, example_job

FOLDER = "/data/recovery"  # where pods see the program
STEPS_BEFORE = 20
WAYS: dict[str, Raw] = {"script": {"script": "ddp.py"}, "exec: torchrun": {"exec": ["torchrun", "ddp.py"]}}
_SAID = re.compile(r"^(imported|joined|step 1) at ([\d.]+)$", re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(description="How long a job does not train after one of its ranks was killed.")
    parser.add_argument("--rounds", type=int, default=5, help="jobs, one after the other (default 5)")
    parser.add_argument("--keep", action="store_true", help="leave the cluster up")
    parser.add_argument("--peer", action="store_true", help="Kubeflow Trainer and JobSet in turn; builds them")
    options = parser.parse_args()
    provider = ThrowawayProvider(ThrowawayCluster.named())
    stack = Stack(provider)
    figures: dict[str, Both] = {way: ({}, {}) for way in WAYS}
    peer: Both = ({}, {})
    try:
        stack.prepare()
        bring_program(stack)
        with installed(provider.cluster) if options.peer else nullcontext():
            for _ in range(options.rounds):
                for way, run in WAYS.items():
                    settle(stack, provider.cluster)
                    note(figures[way], break_once(stack, provider.chaos, run))
                if options.peer:
                    note(peer, break_peer(stack, provider.chaos))
    finally:
        if not options.keep:
            provider.down()
    for way, of_way in figures.items():
        tables = (render_table(ours, summarise(theirs)) for ours, theirs in zip(of_way, peer, strict=True))
        print(f"\n{way}", *tables, sep="\n\n")
    return 0


def bring_program(stack: Stack) -> None:
    """To where the pods see it."""
    folder = stack.folder("datasets") / "recovery"
    folder.mkdir(exist_ok=True)
    shutil.copy(Path(__file__).parent / "ddp.py", folder)
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755)


def break_once(stack: Stack, chaos: Chaos, run: Raw) -> tuple[Stages, Stages]:
    """One job: seconds of its start and of its recovery, each as a whole and by stage."""
    scene = Scene(stack, chaos, f"recovery-{token_hex(2)}")
    scene.watch.start()
    try:
        posted = time.time()
        stack.apply(example_job(scene.job, **program(run)))
        scene.wait_for_step(STEPS_BEFORE)
        struck = kill_rank(chaos, stack.namespace, scene.pod(1))
        scene.wait(lambda watch: bool(watch.steps) and watch.steps[-1].attempt == 1, what="again", timeout_seconds=120)
        scene.finish()
        scene.wait(lambda watch: watch.finished, what="finished", timeout_seconds=120)
        return by_stage(STARTED, posted, moments(scene, 0)), by_stage(RECOVERED, struck, moments(scene, 1))
    finally:
        scene.watch.end()
        remove(scene)


def program(run: Raw) -> Raw:
    """Fields of the spec. What the node requests is small, so that both fit beside the cluster itself."""
    return command(
        {**run, "workingDir": FOLDER}, image=image_name("trainer"), env=[{"name": "OMP_NUM_THREADS", "value": "1"}]
    )


def break_peer(stack: Stack, chaos: Chaos) -> tuple[Stages, Stages]:
    """The same of one TrainJob."""
    stack.apply(make_runtime(program=["torchrun", "ddp.py"], folder=FOLDER))
    job = TrainJob(stack, f"recovery-{token_hex(2)}")
    try:
        posted = time.time()
        job.apply()
        pods = job.wait_for_pods(attempt=0)
        told = job.wait_for_step(pods.names[0], STEPS_BEFORE)
        struck = kill_rank(chaos, stack.namespace, pods.names[1])
        again = job.wait_for_pods(attempt=1)
        told_again = job.wait_for_step(again.names[0], 1)
    finally:
        job.remove()
    return (
        by_stage(STARTED, posted, Moments(pods.made, pods.running, told)),
        by_stage(RECOVERED, struck, Moments(again.made, again.running, told_again)),
    )


def kill_rank(chaos: Chaos, namespace: str, pod: str) -> float:
    """The moment of the signal: who is to get it is found before."""
    processes = chaos.ranks(namespace, pod)[3]
    struck = time.time()
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
    return struck


def moments(scene: Scene, attempt: int) -> Moments:
    """What the job's status and its ranks tell of an attempt."""
    status = scene.watch.status["attempts"][attempt]
    made, running = (seconds(status[when]) for when in ("startTime", "runningTime"))
    return Moments(made, running, said(scene, attempt=attempt), stopped=stopped(scene) if attempt else None)


def stopped(scene: Scene) -> float:
    """When the first attempt was seen to be."""
    return next(
        seen.time
        for seen in scene.watch.sightings
        if any(each["state"] in ("Stopping", "Failed") for each in seen.status.get("attempts", ()))
    )


def said(scene: Scene, *, attempt: int) -> dict[str, float]:
    """What the first node's ranks said; of several the last."""
    log = scene.output / "logs" / f"attempt-{attempt}" / "node-0.log"
    return {what: float(moment) for what, moment in _SAID.findall(log.read_text())}


def seconds(time_of_api: str) -> float:
    return datetime.fromisoformat(time_of_api).timestamp()


if __name__ == "__main__":
    sys.exit(main())
