"""Builder of a fleet of jobs in all states, as the API server returns them."""

from datetime import datetime, timedelta
from typing import Any

from finetune_api.v1alpha1.status import (
    AttemptRecord,
    AttemptState,
    Condition,
    Fault,
    JobStatus,
    Phase,
    Progress,
    WaitStatus,
)
from finetune_operator.controller.reconcile import render_status
from testing.builders.jobs import RawBody, command, spec

GPUS_PER_NODE = 8
HOUR = timedelta(hours=1)


def build_fleet(now: datetime) -> tuple[RawBody, ...]:
    """Return a job that runs after a restart, and one that is queued, suspended, complete, failed and stalled each."""
    return (
        build_job_body("running", _build_running_status(now)),
        build_job_body("queued", _build_queued_status(now)),
        build_job_body("suspended", JobStatus(phase=Phase.SUSPENDED, suspend_time=now - HOUR), suspend=True),
        build_job_body("complete", _build_complete_status(now), namespace="other"),
        build_job_body("failed", _build_failed_status(now), **command({"script": "train.py"})),
        build_job_body("stalled", _build_stalled_status(now)),
    )


def build_job_body(name: str, status: JobStatus, *, namespace: str = "team", **fields: Any) -> RawBody:
    """Return the raw body of a job with two nodes of eight GPUs; None removes a field from the spec."""
    resources = {"limits": {"nvidia.com/gpu": GPUS_PER_NODE}}
    job_spec = {key: value for key, value in spec(resources=resources, **fields).items() if value is not None}
    metadata = {
        "name": name,
        "namespace": namespace,
        "uid": f"uid-{namespace}-{name}",
        "resourceVersion": "1",
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    return {"metadata": metadata, "spec": job_spec, "status": render_status(status)}


def _build_record(number: int, state: AttemptState, begin: datetime, **fields: Any) -> AttemptRecord:
    times = {"start_time": begin, "allocated_time": begin + timedelta(seconds=20), "running_time": begin + HOUR / 60}
    return AttemptRecord(attempt=number, state=state, num_nodes=2, gpus=2 * GPUS_PER_NODE, **{**times, **fields})


def _build_running_status(now: datetime) -> JobStatus:
    failed = _build_record(
        0,
        AttemptState.FAILED,
        now - 4 * HOUR,
        first_step=0,
        first_step_time=now - 3.9 * HOUR,
        last_step=100,
        last_step_time=now - 1.1 * HOUR,
        stop_time=now - 1.05 * HOUR,
        end_time=now - HOUR,
        steps_lost=20,
        reason="NodeLost",
        fault=Fault.INFRASTRUCTURE,
    )
    running = _build_record(
        1,
        AttemptState.RUNNING,
        now - HOUR,
        restart_fault=Fault.INFRASTRUCTURE,
        first_step=80,
        first_step_time=now - 0.9 * HOUR,
        last_step=120,
    )
    progress = Progress(
        step=120, total_steps=300, eta_seconds=9000, loss=1.3, tokens_per_second=18000.0, update_time=now
    )
    degraded = _build_condition("Degraded", "NetworkSockets", now)
    return JobStatus(
        phase=Phase.RUNNING,
        attempt=1,
        attempts=(failed, running),
        restarts=1,
        progress=progress,
        conditions=(degraded,),
    )


def _build_queued_status(now: datetime) -> JobStatus:
    record = AttemptRecord(attempt=0, state=AttemptState.STARTING, num_nodes=2, start_time=now - HOUR)
    waiting = WaitStatus(reason="Unschedulable", message="0/3 nodes fit", since=now - HOUR)
    return JobStatus(phase=Phase.QUEUED, attempt=0, attempts=(record,), waiting=waiting)


def _build_complete_status(now: datetime) -> JobStatus:
    record = _build_record(
        0, AttemptState.SUCCEEDED, now - 5 * HOUR, first_step_time=now - 4.5 * HOUR, end_time=now - 2 * HOUR
    )
    return JobStatus(
        phase=Phase.COMPLETE,
        attempt=0,
        attempts=(record,),
        completion_time=now - 2 * HOUR,
        progress=Progress(step=300, total_steps=300, update_time=now - 2 * HOUR),
    )


def _build_failed_status(now: datetime) -> JobStatus:
    record = _build_record(
        0, AttemptState.FAILED, now - HOUR, end_time=now - HOUR / 6, reason="UserCodeError", fault=Fault.USER
    )
    return JobStatus(phase=Phase.FAILED, attempt=0, attempts=(record,), completion_time=now - HOUR / 6)


def _build_stalled_status(now: datetime) -> JobStatus:
    record = _build_record(0, AttemptState.RUNNING, now - HOUR)
    stalled = _build_condition("Stalled", "ReconcileFailed", now)
    return JobStatus(phase=Phase.RUNNING, attempt=0, attempts=(record,), conditions=(stalled,))


def _build_condition(condition: str, reason: str, now: datetime) -> Condition:
    return Condition(type=condition, status="True", last_transition_time=now - HOUR, reason=reason)
