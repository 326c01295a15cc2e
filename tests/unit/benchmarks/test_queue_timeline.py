"""Tests of the figures of the queue benchmark."""

import pytest

from benchmarks.queue.job_plans import JobAction, plan_queued_jobs
from benchmarks.queue.quota_observer import count_pods_without_quota
from benchmarks.queue.timeline import (
    GpuUse,
    UseChange,
    WaitStage,
    find_idle_intervals,
    measure_admission_delays,
    measure_totals,
)
from benchmarks.queue.workloads import get_reserved_gpus

RawBody = dict[str, object]


def wait(at: float, job: str, gpus: int, stage: WaitStage = WaitStage.QUEUE) -> UseChange:
    return UseChange(at, job, GpuUse(gpus, waits_for=stage))


def run(at: float, job: str, gpus: int, *, bound: int | None = None, is_evicted: bool = False) -> UseChange:
    return UseChange(at, job, GpuUse(gpus, gpus, gpus if bound is None else bound, is_evicted=is_evicted))


def end(at: float, job: str) -> UseChange:
    return UseChange(at, job, GpuUse(0))


def build_workload(*, reclaimable: int = 0, **conditions: str) -> RawBody:
    """Return a Workload of four pods with two GPUs each."""
    assignment = {"name": "main", "count": 4, "resourceUsage": {"cpu": "0", "nvidia.com/gpu": "8"}}
    return {
        "status": {
            "admission": {"podSetAssignments": [assignment]},
            "reclaimablePods": [{"name": "main", "count": reclaimable}] if reclaimable else [],
            "conditions": [{"type": name, "status": status} for name, status in conditions.items()],
        }
    }


def test_gpus_are_idle_while_the_smallest_waiting_job_fits() -> None:
    changes = [
        run(0, "a", 6),
        wait(1, "big", 8),
        wait(2, "small", 2),
        run(5, "small", 2),
        end(9, "a"),
        end(10, "small"),
    ]

    intervals = find_idle_intervals(changes, quota=8)

    # the big job fits from 10 s, which is the end of the timeline
    assert [(i.start, i.end, i.gpu_seconds) for i in intervals] == [(2, 5, 6)]


def test_admission_delay_begins_when_the_job_fits_without_interruption() -> None:
    changes = [
        run(0, "a", 6),
        wait(1, "b", 4),  # does not fit
        end(3, "a"),  # fits
        run(4, "c", 6),  # another job is admitted first
        end(6, "c"),  # fits again
        run(6.5, "b", 4),
    ]

    assert measure_admission_delays(changes, quota=8) == [0.5]


def test_totals_are_integrated_over_time() -> None:
    totals = measure_totals([run(0, "a", 4, bound=0), run(1, "a", 4, bound=6), run(2, "b", 2, bound=1), end(4, "a")])

    assert (totals.max_reserved, totals.max_bound, totals.seconds) == (6, 7, 4)
    assert totals.reserved_gpu_seconds == 4 + 4 + 12
    assert totals.bound_gpu_seconds == 0 + 6 + 14
    assert totals.unbound_gpu_seconds == 4 + 0 + 2


def test_pods_of_which_kueue_has_returned_the_quota_are_not_charged() -> None:
    evicted = UseChange(1, "a", GpuUse(4, 0, 4, returned_early=4, is_evicted=True))

    totals = measure_totals([run(0, "a", 4), evicted, run(1, "b", 6), end(2, "a"), end(2, "b")])

    assert (totals.max_bound, totals.max_charged, totals.max_returned_early) == (10, 6, 4)


@pytest.mark.parametrize(
    ("workload", "deleted", "count"),
    [
        pytest.param(build_workload(QuotaReserved="False", Evicted="True"), True, 1, id="evicted"),
        pytest.param(build_workload(QuotaReserved="False", Evicted="True"), False, 0, id="evicted, pod not deleted"),
        pytest.param(build_workload(QuotaReserved="True", Evicted="True"), True, 0, id="quota not returned"),
        pytest.param(build_workload(QuotaReserved="False"), True, 0, id="not evicted"),
    ],
)
def test_only_terminating_pods_of_evicted_jobs_may_lack_quota(workload: RawBody, deleted: bool, count: int) -> None:
    metadata = {"deletionTimestamp": "2026-11-28T00:00:00Z"} if deleted else {}
    pod = {"metadata": metadata, "spec": {"nodeName": "kwok-1"}, "status": {"phase": "Pending"}}

    assert count_pods_without_quota([pod, {"metadata": metadata, "spec": {}}], workload) == count


@pytest.mark.parametrize(
    ("workload", "gpus"),
    [
        pytest.param(build_workload(QuotaReserved="True"), 8, id="reserved"),
        pytest.param(build_workload(QuotaReserved="True", reclaimable=1), 6, id="one pod has succeeded"),
        pytest.param(build_workload(QuotaReserved="True", Evicted="True"), 8, id="pods terminate"),
        pytest.param(build_workload(QuotaReserved="False"), 0, id="waits"),
        pytest.param(build_workload(QuotaReserved="True", Finished="True"), 0, id="finished"),
        pytest.param({}, 0, id="no status"),
    ],
)
def test_workload_reserves_gpus_until_its_pods_have_ended(workload: RawBody, gpus: int) -> None:
    assert get_reserved_gpus(workload) == gpus


def test_planned_jobs_fit_into_the_quota_and_are_disturbed_in_all_ways() -> None:
    jobs = plan_queued_jobs(200, seconds=100, quota=16, seed=1)

    assert len({job.name for job in jobs}) == 200
    assert all(1 <= job.gpus <= 16 and 0 <= job.start_seconds <= 100 for job in jobs)
    assert {job.action for job in jobs} == set(JobAction)
    assert {job.priority for job in jobs} == {"low", "normal", "high"}
    assert jobs == plan_queued_jobs(200, seconds=100, quota=16, seed=1)
