"""`make bench-recovery`: until a job trains, and after the death of a rank until it trains again, on real pods.

2 nodes x 2 ranks run a bare torch DDP loop (`ddp.py`), with images that are on the machines already: as a script, which
our launcher starts, and in turn with it under a torchrun that the job starts itself.
SIGKILL strikes one rank of the second node. The clock is one: the nodes are network namespaces of this machine.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sys
import time
from datetime import datetime
from pathlib import Path
from secrets import token_hex

from benchmarks.table import Figures, render_table
from chaos.run import remove
from chaos.scene import Raw, Scene, settle
from cluster.chaos import Chaos
from cluster.images import image_name
from cluster.provider import ThrowawayProvider
from cluster.throwaway import ThrowawayCluster
from support.builders import command
from support.stack import Stack, example_job

FOLDER = "/data/recovery"  # where pods see the program
STEPS_BEFORE = 20
WAYS: dict[str, Raw] = {"script": {"script": "ddp.py"}, "exec: torchrun": {"exec": ["torchrun", "ddp.py"]}}
PEER = {
    "rank killed to the first step of the next attempt": "11.9",
    "  until the new pods are made": "4.9",
}  # docs/operations.md
_SAID = re.compile(r"^(imported|joined|step 1) at ([\d.]+)$", re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(description="How long a job does not train after one of its ranks was killed.")
    parser.add_argument("--rounds", type=int, default=5, help="jobs, one after the other (default 5)")
    parser.add_argument("--keep", action="store_true", help="leave the cluster up")
    options = parser.parse_args()
    provider = ThrowawayProvider(ThrowawayCluster.named())
    stack = Stack(provider)
    figures: dict[str, tuple[Figures, Figures]] = {way: ({}, {}) for way in WAYS}  # of the start, and of the recovery
    try:
        stack.prepare()
        bring_program(stack)
        for _ in range(options.rounds):
            for way, run in WAYS.items():
                settle(stack, provider.cluster)
                for known, stages in zip(figures[way], break_once(stack, provider.chaos, run), strict=True):
                    for title, taken in stages.items():
                        known.setdefault(title, []).append(taken)
    finally:
        if not options.keep:
            provider.down()
    for way, (started, recovered) in figures.items():
        print(f"\n{way}", render_table(started, {}), render_table(recovered, PEER), sep="\n\n")
    return 0


def bring_program(stack: Stack) -> None:
    """To where the pods see it."""
    folder = stack.folder("datasets") / "recovery"
    folder.mkdir(exist_ok=True)
    shutil.copy(Path(__file__).parent / "ddp.py", folder)
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755)


def break_once(stack: Stack, chaos: Chaos, run: Raw) -> tuple[dict[str, float], dict[str, float]]:
    """One job: seconds of its start and of its recovery, each as a whole and by stage."""
    scene = Scene(stack, chaos, f"recovery-{token_hex(2)}")
    scene.watch.start()
    try:
        posted = time.time()
        stack.apply(example_job(scene.job, **program(run)))
        scene.wait_for_step(STEPS_BEFORE)
        struck = kill_rank(scene)
        scene.wait(lambda watch: bool(watch.steps) and watch.steps[-1].attempt == 1, what="again", timeout_seconds=120)
        scene.finish()
        scene.wait(lambda watch: watch.finished, what="finished", timeout_seconds=120)
        return start(scene, posted), recovery(scene, struck)
    finally:
        scene.watch.end()
        remove(scene)


def program(run: Raw) -> Raw:
    """Fields of the spec. What the node requests is small, so that both fit beside the cluster itself."""
    return command(
        {**run, "workingDir": FOLDER}, image=image_name("trainer"), env=[{"name": "OMP_NUM_THREADS", "value": "1"}]
    )


def kill_rank(scene: Scene) -> float:
    """The moment of the signal: who is to get it is found before."""
    processes = scene.chaos.ranks(scene.stack.namespace, scene.pod(1))[3]
    struck = time.time()
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
    return struck


def start(scene: Scene, posted: float) -> dict[str, float]:
    """Seconds since the job was applied, of kubectl's own the first half."""
    status, told = scene.watch.status, said(scene, attempt=0)
    reached = {
        "job applied to its first step": told["step 1"],
        "  until its pods are made": seconds(status["attempts"][0]["startTime"]),
        "  until the operator sees both run": seconds(status["attempts"][0]["runningTime"]),
        "  until rank 0 has imported torch": told["imported"],
        "  until it has joined the group": told["joined"],
    }
    return {title: round(moment - posted, 3) for title, moment in reached.items()}


def recovery(scene: Scene, struck: float) -> dict[str, float]:
    """The whole and, indented, when each stage was reached. All in seconds since the kill."""
    status, told = scene.watch.status, said(scene, attempt=1)
    noticed = next(
        seen.time
        for seen in scene.watch.sightings
        if any(each["state"] in ("Stopping", "Failed") for each in seen.status.get("attempts", ()))
    )
    reached = {
        "rank killed to the first step of the next attempt": told["step 1"],
        "  until the operator stopped the attempt": noticed,
        "  until the new pods are made": seconds(status["attempts"][1]["startTime"]),
        "  until the operator sees both run": seconds(status["attempts"][1]["runningTime"]),
        "  until rank 0 has imported torch": told["imported"],
        "  until it has joined the group": told["joined"],
    }
    return {title: round(moment - struck, 3) for title, moment in reached.items()}


def said(scene: Scene, *, attempt: int) -> dict[str, float]:
    """What the first node's ranks said; of several the last."""
    log = scene.output / "logs" / f"attempt-{attempt}" / "node-0.log"
    return {what: float(moment) for what, moment in _SAID.findall(log.read_text())}


def seconds(time_of_api: str) -> float:
    return datetime.fromisoformat(time_of_api).timestamp()


if __name__ == "__main__":
    sys.exit(main())
