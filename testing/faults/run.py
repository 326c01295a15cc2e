"""One fault, once: a job is brought to where it is struck, and followed to its end and beyond."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from secrets import token_hex

from finetune_operator import names
from testing.cluster.fault_injection import Chaos
from testing.faults.catalog.fault import Fault, When
from testing.faults.evidence import keep_evidence
from testing.faults.expectation import Expectation
from testing.faults.job_recorder import Sighting, Step, Watch
from testing.faults.job_under_test import TROUBLE, Raw, Scene, settle
from testing.faults.outcome import Run, deviations, read_status
from testing.processes.operator_stack import Stack, example_job

STEPS_AFTERWARDS = 5  # that a job must train on before it is believed to be well
CHILDREN = "pods,services,configmaps"


@dataclass
class Times:
    """When the fault began to be made, and when it was over."""

    struck: float = 0.0
    over: float | None = None


def run_fault(stack: Stack, chaos: Chaos, fault: Fault, expected: Expectation, *, at_once: int = 1) -> tuple[Run, str]:
    """Leaves the cluster as it was. Returns the folder of the evidence as well if it went otherwise than expected."""
    settle(stack, chaos.cluster)
    scene = Scene(stack, chaos, f"{expected.name[:40]}-{token_hex(2)}")
    times, began = Times(), datetime.now(UTC).isoformat(timespec="seconds")
    trouble = ""
    leftovers: tuple[str, ...] = ()
    scene.watch.start()
    try:
        follow(scene, fault, expected, times)
        leftovers = stale_pods(scene)
    except TROUBLE as error:
        trouble = " ".join(str(error).split())[:300]
    finally:
        scene.watch.end()
    run = Run(
        fault=expected.name,
        began=began,
        at_once=at_once,
        trouble=trouble,
        leftovers=leftovers,
        waited_for=waited_for(scene.watch.sightings),
        **read_status(scene.watch.status),
        **measure(scene.watch, times),
    )
    evidence = evidence_of(scene, expected, run)  # the job's own goes with it
    try:
        run = replace(run, leftovers=(*leftovers, *remove(scene)))
    except TROUBLE as error:
        run = replace(run, trouble=trouble or f"not removed: {error}")
    return run, evidence or evidence_of(scene, expected, run)


def evidence_of(scene: Scene, expected: Expectation, run: Run) -> str:
    """The folder where it is kept if the run is not as expected."""
    return str(keep_evidence(scene, run.began)) if deviations(expected, run) else ""


def follow(scene: Scene, fault: Fault, expected: Expectation, times: Times) -> None:
    """To the job's end. The fault is undone on every way out."""
    with ExitStack() as made:
        job = example_job(scene.job, **fault.fields(scene))
        if fault.when is When.BEFORE:
            made.enter_context(fault.strike(scene))
        times.struck = time.time()
        scene.stack.apply(job)
        if fault.when is When.STARTING:
            scene.wait(lambda watch: bool(watch.attempts), what="begun", timeout_seconds=30)
        elif fault.when is When.TRAINING:
            scene.wait_for_step(fault.at_step)
        if fault.when in (When.STARTING, When.TRAINING):
            times.struck = time.time()
            made.enter_context(fault.strike(scene))
        if fault.lasts_seconds is not None:
            time.sleep(max(0.0, times.struck + fault.lasts_seconds - time.time()))
            made.close()
            times.over = time.time()
        patience = fault.patience_seconds
        with trains_on(scene):
            scene.wait(lambda watch: is_well(watch, expected, times), what="training again", timeout_seconds=patience)
    with trains_on(scene):
        scene.wait(lambda watch: watch.finished, what="finished", timeout_seconds=120)


@contextmanager
def trains_on(scene: Scene) -> Iterator[None]:
    """Whatever becomes of the wait, the job may end afterwards: what it came to is told, too."""
    try:
        yield
    finally:
        with suppress(OSError):
            scene.finish()


def is_well(watch: Watch, expected: Expectation, times: Times) -> bool:
    """It ended, or trains in the attempt that is expected to last."""
    if watch.finished:
        return True
    since = max(times.struck, times.over or 0.0)
    fresh = [step for step in watch.steps if step.time > since and step.attempt >= expected.restarts]
    return len(fresh) >= STEPS_AFTERWARDS and expected.phase == "Complete"


def stale_pods(scene: Scene, *, patience_seconds: float = 30) -> tuple[str, ...]:
    """Pods of attempts before the last, which a job that ended has no more."""
    last = str(scene.watch.status.get("attempt", 0))

    def found() -> tuple[str, ...]:
        pods = scene.stack.pods(scene.job)
        return tuple(pod["metadata"]["name"] for pod in pods if pod["metadata"]["labels"][names.ATTEMPT] != last)

    deadline = time.monotonic() + patience_seconds
    while (left := found()) and time.monotonic() < deadline:
        time.sleep(0.5)
    return left


def remove(scene: Scene, *, patience_seconds: float = 180) -> tuple[str, ...]:
    """Delete the job and its output; the names of children that outlive it.

    The garbage collector needs its watches: after an API server that was away for long they may pause for a minute.
    """
    scene.stack.delete(scene.job)
    selector = f"{names.JOB_NAME}={scene.job}"
    deadline = time.monotonic() + patience_seconds
    while left := scene.stack.kubectl("get", CHILDREN, "-l", selector, "-o", "name").split():
        if time.monotonic() > deadline:
            break
        time.sleep(0.3)
    shutil.rmtree(scene.output, ignore_errors=True)
    return tuple(left)


def waited_for(sightings: Sequence[Sighting]) -> tuple[str, ...]:
    """Reasons that `status.waiting` gave, each once."""
    told = ((sighting.status.get("waiting") or {}).get("reason") for sighting in sightings)
    return tuple(dict.fromkeys(reason for reason in told if reason))


def measure(watch: Watch, times: Times) -> Raw:
    """Fields of a Run that only a clock and the logs tell."""
    struck = watch.struck or times.struck
    done = [step.step for step in watch.steps]
    noticed = next((seen.time for seen in watch.sightings if seen.time >= struck and shows_trouble(seen.status)), None)
    return {
        "detected_seconds": round(noticed - struck, 2) if noticed is not None else None,
        "again_seconds": again_seconds(watch.steps, struck, times.over),
        "steps_lost": len(done) - len(set(done)),
        "steps_missing": max(done, default=0) - len(set(done)),
    }


def shows_trouble(status: Raw) -> bool:
    attempts = status.get("attempts", ())
    states = [attempt["state"] for attempt in attempts]
    return bool(status.get("waiting")) or any(state in ("Stopping", "Failed") for state in states)


def again_seconds(steps: Sequence[Step], struck: float, over: float | None) -> float | None:
    """To the first step of a later attempt than the one that was struck; from the end of what kept it from starting."""
    before = [step for step in steps if step.time < struck]
    if before:
        again = next((step.time for step in steps if step.attempt > before[-1].attempt), None)
        return round(again - struck, 2) if again is not None else None
    since = over if over is not None else struck
    return round(steps[0].time - since, 2) if steps else None
