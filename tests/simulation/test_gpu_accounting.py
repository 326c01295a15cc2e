"""Tests that the simulator finds bugs in the accounting of GPU-seconds, and that it causes no status writes."""

from datetime import datetime

import pytest

from finetune_api.v1alpha1.status import JobStatus
from finetune_operator.core import attempt_record, decision, gpu_seconds
from finetune_operator.core.gpu_seconds import GpuTime, account_gpu_time
from finetune_operator.core.job_context import JobContext
from finetune_operator.failures import node_avoidance
from testing.simulator.gpu_invariants import GpuMonitor
from testing.simulator.history import run_history
from testing.simulator.planted_bugs import PlantBug, assert_search_finds
from testing.simulator.scenarios import SCENARIO_KINDS
from testing.simulator.search import search
from testing.simulator.world.choices import SeededChoices

SEED_WITH_DROPPED_ATTEMPTS = 57


def count_gpus_from_the_start_of_the_attempt(patch: pytest.MonkeyPatch) -> None:
    """Count the GPUs of pods that wait for capacity, as if they had been assigned when the attempt started."""

    def record_allocation(context: JobContext, status: JobStatus) -> JobStatus:
        records = gpu_seconds.record_allocation(context, status).attempts
        attempts = (r.model_copy(update={"allocated_time": r.start_time}) if r.gpus else r for r in records)
        return status.model_copy(update={"attempts": tuple(attempts)})

    patch.setattr(decision, "record_allocation", record_allocation)


def count_the_last_attempt_only(patch: pytest.MonkeyPatch) -> None:
    """Forget the GPU-seconds of earlier attempts."""

    def account(status: JobStatus, now: datetime, *, is_command: bool) -> GpuTime:
        last_attempt = status.model_copy(update={"attempts": status.attempts[-1:]})
        return account_gpu_time(last_attempt, now, is_command=is_command)

    patch.setattr(gpu_seconds, "account_gpu_time", account)


def forget_dropped_attempts(patch: pytest.MonkeyPatch) -> None:
    """Drop attempts from a status that lists three of them, without their GPU-seconds."""
    patch.setattr(node_avoidance, "MAX_KEPT_ATTEMPTS", 3)
    patch.setattr(attempt_record, "drop_attempts", lambda *_, **__: ())


@pytest.mark.parametrize(
    ("plant_bug", "kind", "seed"),  # a seed that finds the bug; after a change of the simulator, the search continues
    [
        pytest.param(count_gpus_from_the_start_of_the_attempt, "resource_faults", 0, id="queued pods"),
        pytest.param(count_the_last_attempt_only, "failing_job_nodes", 6, id="earlier attempts"),
        pytest.param(forget_dropped_attempts, "lost_k8s_nodes", SEED_WITH_DROPPED_ATTEMPTS, id="dropped attempts"),
    ],
)
def test_search_finds_planted_accounting_bug(plant_bug: PlantBug, kind: str, seed: int) -> None:
    assert_search_finds(plant_bug, kind, seed)


def test_status_that_lists_three_attempts_violates_no_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_avoidance, "MAX_KEPT_ATTEMPTS", 3)

    seeds = range(SEED_WITH_DROPPED_ATTEMPTS - 5, SEED_WITH_DROPPED_ATTEMPTS + 5)
    assert search("lost_k8s_nodes", seeds).counterexample is None


def count_status_writes(kind: str) -> int:
    """Return the number of status writes of operators in 8 histories."""
    traces = []
    for seed in range(8):
        choices = SeededChoices(seed)
        traces.append(run_history(SCENARIO_KINDS[kind](choices), choices).trace)
    return sum("operator" in line and "MODIFIED FineTuneJob" in line for trace in traces for line in trace)


@pytest.mark.parametrize("kind", ["failing_job_nodes", "resource_faults"])
def test_gpu_seconds_cause_no_status_writes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = count_status_writes(kind)
    monkeypatch.setattr(GpuMonitor, "_check_job", lambda monitor, job: None)
    monkeypatch.setattr(decision, "record_allocation", lambda context, status: status)
    monkeypatch.setattr(decision, "update_gpu_seconds", lambda previous, status, now, *, is_command: status)

    assert count_status_writes(kind) == writes > 40
