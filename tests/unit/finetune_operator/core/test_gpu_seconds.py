"""Tests of the division of GPU time into phases."""

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_api.schema.status_schema import bound_status
from finetune_api.v1alpha1.status import MAX_GPU_SECONDS, AttemptRecord, AttemptState, Fault, GpuSeconds, JobStatus
from finetune_operator.core.gpu_seconds import (
    MICROSECOND,
    MICROSECONDS,
    GpuCategory,
    GpuPhase,
    account_gpu_time,
    divide_attempt,
    drop_attempts,
    render_gpu_seconds,
)
from testing.builders.jobs import NOW, build_observation, decide_once, decide_with, job, pod, running_pod
from testing.builders.statuses import get_time_after_start

GPUS = 8
LIMITS = {"limits": {"nvidia.com/gpu": 4}}
CONDITION = {"type": "PodScheduled", "status": "True"}


def attempt(number: int = 0, *, state: AttemptState = AttemptState.RUNNING, **seconds: Any) -> AttemptRecord:
    """Return the record of an attempt with eight GPUs; `<name>_at` sets `<name>_time` to seconds after NOW."""
    times = {f"{name[:-3]}_time": NOW + timedelta(seconds=at) for name, at in seconds.items() if name.endswith("_at")}
    others = {name: value for name, value in seconds.items() if not name.endswith("_at")}
    return AttemptRecord(attempt=number, state=state, gpus=GPUS, **times, **others)


def account(
    *records: AttemptRecord, now: int = 1000, is_command: bool = False, is_finished: bool = False
) -> dict[Any, int]:
    """Return the seconds per phase and fault, divided by the number of GPUs."""
    status = JobStatus(attempts=records, completion_time=NOW if is_finished else None)
    gpu_time = account_gpu_time(status, get_time_after_start(now), is_command=is_command)
    return {category: time // (GPUS * MICROSECONDS) for category, time in gpu_time.items()}


FAILED = attempt(
    state=AttemptState.FAILED,
    allocated_at=0,
    first_step_at=100,
    last_step_at=300,
    stop_at=350,
    end_at=360,
    first_step=0,
    last_step=20,
    fault=Fault.INFRASTRUCTURE,
)


def test_phases_of_a_running_attempt_are_separated_by_the_first_step() -> None:
    assert account(attempt(allocated_at=10, running_at=40)) == {(GpuPhase.STARTING, None): 990}
    assert account(attempt(allocated_at=10, running_at=40, first_step_at=110)) == {
        (GpuPhase.STARTING, None): 100,
        (GpuPhase.USEFUL, None): 890,
    }


def test_restart_is_attributed_to_the_fault_of_the_failure() -> None:
    restarted = attempt(1, allocated_at=400, first_step_at=460, restart_fault=Fault.INFRASTRUCTURE)

    assert account(FAILED.model_copy(update={"steps_lost": 5}), restarted) == {
        (GpuPhase.STARTING, None): 100,
        (GpuPhase.USEFUL, None): 150 + 540,  # a quarter of 200 seconds was repeated
        (GpuPhase.LOST, Fault.INFRASTRUCTURE): 50 + 50,  # and the failure was detected after 50 seconds
        (GpuPhase.STOPPING, Fault.INFRASTRUCTURE): 10,
        (GpuPhase.STARTING, Fault.INFRASTRUCTURE): 60,
    }


def test_time_between_attempts_and_before_the_allocation_counts_nothing() -> None:
    suspended = attempt(state=AttemptState.STOPPED, allocated_at=0, first_step_at=0, stop_at=100, end_at=130)
    queued = attempt(1, state=AttemptState.STARTING, start_at=500)

    assert account(suspended, queued) == {(GpuPhase.USEFUL, None): 100, (GpuPhase.STOPPING, None): 30}


def test_steps_of_a_failed_job_are_lost() -> None:
    failed = FAILED.model_copy(update={"fault": Fault.USER})

    assert account(
        attempt(state=AttemptState.STOPPED, allocated_at=0, first_step_at=0, end_at=70), failed, is_finished=True
    ) == {
        (GpuPhase.STARTING, None): 100,
        (GpuPhase.LOST, Fault.USER): 70 + 200 + 50,
        (GpuPhase.STOPPING, Fault.USER): 10,
    }


@pytest.mark.parametrize(
    ("state", "phase"), [(AttemptState.RUNNING, GpuPhase.UNREPORTED), (AttemptState.SUCCEEDED, GpuPhase.USEFUL)]
)
def test_command_without_reported_steps_is_useful_if_it_succeeds(state: AttemptState, phase: GpuPhase) -> None:
    record = attempt(state=state, allocated_at=0, running_at=30, end_at=200)

    assert account(record, is_command=True) == {(GpuPhase.STARTING, None): 30, (phase, None): 170}


TIMES = st.one_of(st.none(), st.integers(-(10**6), 10**6).map(lambda ms: NOW + timedelta(milliseconds=ms)))
STEPS = st.one_of(st.none(), st.integers(0, 10**9))
RECORDS = st.builds(
    AttemptRecord,
    attempt=st.integers(0, 40),
    state=st.sampled_from(AttemptState),
    gpus=st.one_of(st.none(), st.integers(0, 2**53)),
    restart_fault=st.one_of(st.none(), st.sampled_from(Fault)),
    fault=st.one_of(st.none(), st.sampled_from(Fault)),
    **{f"{name}_time": TIMES for name in ("start", "allocated", "running", "first_step", "last_step", "stop", "end")},
    **dict.fromkeys(("first_step", "last_step", "steps_lost"), STEPS),
)


@given(records=st.lists(RECORDS, max_size=5), now=TIMES.filter(bool), is_command=st.booleans(), finished=st.booleans())
def test_sum_of_all_phases_is_the_held_time_multiplied_by_the_gpus(
    records: list[AttemptRecord], now: Any, is_command: bool, finished: bool
) -> None:
    """It holds for times in any order, which wrong clocks and forged progress can cause."""
    status = JobStatus(attempts=tuple(records), completion_time=NOW if finished else None)

    gpu_time = account_gpu_time(status, now, is_command=is_command)

    held = [
        (record.gpus or 0) * (max(timedelta(), (record.end_time or now) - record.allocated_time) // MICROSECOND)
        for record in records
        if record.allocated_time is not None
    ]
    assert sum(gpu_time.values()) == sum(held)
    assert all(time > 0 for time in gpu_time.values())


def test_dropped_attempts_stay_counted() -> None:
    other = attempt(1, state=AttemptState.FAILED, allocated_at=400, end_at=410, fault=Fault.TRANSIENT)
    status = JobStatus(attempts=(FAILED, other), dropped_gpu_seconds=(GpuSeconds(phase="starting", seconds=5),))
    before = account_gpu_time(status, NOW, is_command=False)

    dropped = drop_attempts(status, (other,), NOW, is_command=False)
    after = status.model_copy(update={"attempts": (other,), "dropped_gpu_seconds": dropped})

    assert account_gpu_time(after, NOW, is_command=False) == before
    assert sum(entry.seconds for entry in dropped) == 5 + 360 * GPUS


def test_all_categories_fit_into_the_status() -> None:
    categories: dict[GpuCategory, int] = {(phase, fault): 10**15 for phase in GpuPhase for fault in (None, *Fault)}
    assert len(categories) < MAX_GPU_SECONDS

    status = JobStatus(gpu_seconds=render_gpu_seconds(categories))

    assert bound_status(status) == status


def test_gpus_count_from_the_assignment_of_each_pod_to_a_kubernetes_node() -> None:
    ftjob, _ = decide_with(job(resources=LIMITS))
    pods = [
        pod(ftjob, rank, conditions=[{**CONDITION, "lastTransitionTime": get_time_after_start(at).isoformat()}])
        for rank, at in enumerate((10, 50))
    ]

    partly, _ = decide_with(ftjob, pods[0], now=get_time_after_start(55))
    ftjob, _ = decide_with(ftjob, *pods, now=get_time_after_start(60))

    assert partly.status.attempts[-1].gpus == GPUS / 2
    assert partly.status.attempts[-1].allocated_time == get_time_after_start(10)
    assert ftjob.status.attempts[-1].gpus == GPUS
    assert ftjob.status.attempts[-1].allocated_time == get_time_after_start(30)
    gpu_time = divide_attempt(ftjob.status.attempts[-1], get_time_after_start(60), is_command=False)
    assert gpu_time == {(GpuPhase.STARTING, None): (4 * 50 + 4 * 10) * MICROSECONDS}


def test_gpu_seconds_cause_no_status_write_of_their_own() -> None:
    ftjob, _ = decide_with(job(resources=LIMITS))
    observation = build_observation(ftjob, *(running_pod(ftjob, rank) for rank in range(2)))
    ftjob, _ = decide_once(ftjob, observation, now=get_time_after_start(60))

    later, _ = decide_once(ftjob, observation, now=get_time_after_start(3600))

    assert ftjob.status.gpu_seconds == (GpuSeconds(phase="starting", seconds=60 * GPUS),)
    assert later.status == ftjob.status


def test_job_without_gpus_has_no_gpu_seconds() -> None:
    ftjob, _ = decide_with(job())
    observation = build_observation(ftjob, *(running_pod(ftjob, rank) for rank in range(2)))
    ftjob, _ = decide_once(ftjob, observation, now=get_time_after_start(60))

    assert ftjob.status.attempts[-1].gpus is None
    assert ftjob.status.gpu_seconds == ()
