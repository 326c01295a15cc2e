"""Run one fault: start a job, inject the fault, wait for recovery and completion, and measure the times."""

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
from testing.faults.catalog.fault import InjectedFault, InjectionTime
from testing.faults.evidence import save_evidence
from testing.faults.expectation import OPERATOR_RESTARTS, Expectation
from testing.faults.job_recorder import JobRecorder, RecordedStep, StatusChange
from testing.faults.job_under_test import HARNESS_ERRORS, JobUnderTest, RawBody, count_restarts, wait_until_settled
from testing.faults.outcome import FaultRun, find_deviations, parse_status
from testing.faults.training_job import request_finish
from testing.processes.operator_stack import OperatorInstallation, build_example_job

STEPS_AFTER_RECOVERY = 5  # steps to train before a job counts as recovered
CHILDREN = "pods,services,configmaps"


@dataclass
class FaultTimes:
    """Unix times at which the injection began and at which the fault was removed."""

    injected_at: float = 0.0
    removed_at: float | None = None


def run_fault(
    installation: OperatorInstallation,
    chaos: Chaos,
    fault: InjectedFault,
    expectation: Expectation,
    *,
    concurrency: int = 1,
) -> tuple[FaultRun, str]:
    """Run the fault once and restore the cluster.

    Returns the run and, if it deviates from the expectation, the folder with the evidence.
    """
    # start with a healthy cluster
    wait_until_settled(installation, chaos.cluster)
    job = JobUnderTest(installation, chaos, f"{expectation.name[:40]}-{token_hex(2)}")
    times, started_at = FaultTimes(), datetime.now(UTC).isoformat(timespec="seconds")
    harness_error = ""
    leftovers: tuple[str, ...] = ()
    # run the job with the fault; the result includes errors of the test harness
    job.recorder.start()
    preparation = ExitStack()
    try:
        preparation.enter_context(fault.prepare(job))
        run_to_end(job, fault, expectation, times)
        leftovers = find_stale_pods(job)
        job.values.setdefault(OPERATOR_RESTARTS, sum(map(count_restarts, job.list_operator_pods())))
    except HARNESS_ERRORS as error:
        harness_error = " ".join(str(error).split())[:300]
    finally:
        job.recorder.stop()
    run = FaultRun(
        fault=expectation.name,
        began=started_at,
        at_once=concurrency,
        trouble=harness_error,
        leftovers=leftovers,
        waited_for=list_pending_reasons(job.recorder.status_changes),
        values=select_expected_values(job, expectation),
        **parse_status(job.recorder.status),
        **measure_recovery(job.recorder, times),
    )
    evidence = save_evidence_of_deviation(job, expectation, run)  # save evidence before the job is deleted
    try:
        with preparation:
            run = replace(run, leftovers=(*leftovers, *delete_job(job)))
    except HARNESS_ERRORS as error:
        run = replace(run, trouble=harness_error or f"not removed: {error}")
    return run, evidence or save_evidence_of_deviation(job, expectation, run)


def select_expected_values(job: JobUnderTest, expectation: Expectation) -> dict[str, str | float]:
    expected_names = {expected.name for expected in expectation.values}
    return {name: value for name, value in job.values.items() if name in expected_names}


def save_evidence_of_deviation(job: JobUnderTest, expectation: Expectation, run: FaultRun) -> str:
    """Save evidence if the run deviates from the expectation; return its folder, or an empty string."""
    return str(save_evidence(job, run.began)) if find_deviations(expectation, run) else ""


def run_to_end(job: JobUnderTest, fault: InjectedFault, expectation: Expectation, times: FaultTimes) -> None:
    """Inject the fault and wait until the job has ended; always remove the fault."""
    with ExitStack() as injection:
        manifest = build_example_job(job.name, **fault.build_spec_fields(job))
        if fault.injection_time is InjectionTime.BEFORE_CREATION:
            injection.enter_context(fault.inject(job))
        times.injected_at = time.time()
        job.installation.apply(manifest)
        if fault.injection_time is InjectionTime.STARTING:
            job.wait_until(lambda recorder: bool(recorder.attempts), goal="begun", timeout_seconds=30)
        elif fault.injection_time is InjectionTime.TRAINING:
            job.wait_for_step(fault.injection_step)
        if fault.injection_time in (InjectionTime.STARTING, InjectionTime.TRAINING):
            times.injected_at = time.time()
            injection.enter_context(fault.inject(job))
        if fault.duration_seconds is not None:
            time.sleep(max(0.0, times.injected_at + fault.duration_seconds - time.time()))
            injection.close()
            times.removed_at = time.time()
        timeout = fault.recovery_timeout_seconds
        with finish_on_exit(job):
            job.wait_until(
                lambda recorder: has_recovered(recorder, expectation, times),
                goal="training again",
                timeout_seconds=timeout,
            )
    with finish_on_exit(job):
        job.wait_until(lambda recorder: recorder.is_finished, goal="finished", timeout_seconds=120)


@contextmanager
def finish_on_exit(job: JobUnderTest) -> Iterator[None]:
    """Make the job end when the block exits, even after an error, so that its final status is recorded."""
    try:
        yield
    finally:
        with suppress(OSError):
            request_finish(job.installation, job.name)


def has_recovered(recorder: JobRecorder, expectation: Expectation, times: FaultTimes) -> bool:
    """Return whether the job has ended, or trains in the attempt that is expected to be the last."""
    if recorder.is_finished:
        return True
    recovery_start = max(times.injected_at, times.removed_at or 0.0)
    new_steps = [step for step in recorder.steps if step.time > recovery_start and step.attempt >= expectation.restarts]
    return len(new_steps) >= STEPS_AFTER_RECOVERY and expectation.phase == "Complete"


def find_stale_pods(job: JobUnderTest, *, timeout_seconds: float = 30) -> tuple[str, ...]:
    """Return the pods of earlier attempts that still exist after the timeout, although the job has finished."""
    current_attempt = str(job.recorder.status.get("attempt", 0))

    def find_older_pods() -> tuple[str, ...]:
        pods = job.installation.list_pods(job.name)
        return tuple(
            pod["metadata"]["name"] for pod in pods if pod["metadata"]["labels"][names.ATTEMPT] != current_attempt
        )

    deadline = time.monotonic() + timeout_seconds
    while (remaining := find_older_pods()) and time.monotonic() < deadline:
        time.sleep(0.5)
    return remaining


def delete_job(job: JobUnderTest, *, timeout_seconds: float = 180) -> tuple[str, ...]:
    """Delete the job and its output; return the names of children that still exist after the timeout.

    After a long outage of the API server, the garbage collector's watches may be delayed by a minute.
    """
    job.installation.delete(job.name)
    selector = f"{names.JOB_NAME}={job.name}"
    deadline = time.monotonic() + timeout_seconds
    while remaining := job.installation.kubectl("get", CHILDREN, "-l", selector, "-o", "name").split():
        if time.monotonic() > deadline:
            break
        time.sleep(0.3)
    shutil.rmtree(job.output, ignore_errors=True)
    return tuple(remaining)


def list_pending_reasons(status_changes: Sequence[StatusChange]) -> tuple[str, ...]:
    """Return the distinct reasons of `status.waiting`, in order."""
    reasons = ((change.status.get("waiting") or {}).get("reason") for change in status_changes)
    return tuple(dict.fromkeys(reason for reason in reasons if reason))


def measure_recovery(recorder: JobRecorder, times: FaultTimes) -> RawBody:
    """Return the FaultRun fields that are derived from times and logged steps."""
    injected_at = recorder.injected_at or times.injected_at
    trained_steps = [step.step for step in recorder.steps]
    detected_at = next(
        (
            change.time
            for change in recorder.status_changes
            if change.time >= injected_at and reports_failure(change.status)
        ),
        None,
    )
    return {
        "detected_seconds": round(detected_at - injected_at, 2) if detected_at is not None else None,
        "again_seconds": measure_seconds_until_training(recorder.steps, injected_at, times.removed_at),
        "steps_lost": len(trained_steps) - len(set(trained_steps)),
        "steps_missing": max(trained_steps, default=0) - len(set(trained_steps)),
    }


def reports_failure(status: RawBody) -> bool:
    attempts = status.get("attempts", ())
    states = [attempt["state"] for attempt in attempts]
    return bool(status.get("waiting")) or any(state in ("Stopping", "Failed") for state in states)


def measure_seconds_until_training(
    steps: Sequence[RecordedStep], injected_at: float, removed_at: float | None
) -> float | None:
    """Return the seconds until the next attempt trains its first step.

    For a job that had not started, return the seconds from the removal of the fault to its first step.
    """
    steps_before = [step for step in steps if step.time < injected_at]
    if steps_before:
        training_at = next((step.time for step in steps if step.attempt > steps_before[-1].attempt), None)
        return round(training_at - injected_at, 2) if training_at is not None else None
    recovery_start = removed_at if removed_at is not None else injected_at
    return round(steps[0].time - recovery_start, 2) if steps else None
