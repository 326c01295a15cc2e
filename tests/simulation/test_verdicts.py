"""Tests that the verdict on an attempt names a fault that was injected into it, whenever the fault happens."""

import itertools
import random

import pytest

from finetune_api.v1alpha1.reasons import Reason
from testing.simulator.history import HistoryResult, Scenario, Trigger, run_history
from testing.simulator.incidents.job_incidents import (
    Incident,
    delete_pod,
    evict_by_kueue,
    evict_pod,
    evict_pod_by_taint,
    exhaust_gpu_memory,
    exhaust_host_memory,
    exit_without_result,
    force_delete_pod,
    hang_rank,
    kill_container,
    kill_rank,
    preempt_by_kueue,
    raise_in_rank,
)
from testing.simulator.incidents.user_interference import edit_labels
from testing.simulator.world.choices import SeededChoices

START_SECONDS = 9.0  # all pods of an attempt run after at most 6.3 s
# pod and rank faults, with the reasons of the verdict on each of them
FAULT_REASONS: dict[Incident, frozenset[str]] = {
    delete_pod: frozenset({Reason.POD_DELETED}),
    force_delete_pod: frozenset({Reason.POD_DELETED}),
    edit_labels: frozenset({Reason.POD_DELETED}),
    evict_pod: frozenset({Reason.PREEMPTED}),
    evict_pod_by_taint: frozenset({Reason.NODE_LOST}),
    evict_by_kueue: frozenset({Reason.PREEMPTED}),
    preempt_by_kueue: frozenset({Reason.PREEMPTED}),
    kill_rank: frozenset({Reason.RANK_KILLED}),
    raise_in_rank: frozenset({Reason.USER_CODE_ERROR, Reason.NON_FINITE_LOSS}),
    hang_rank: frozenset({Reason.HANG}),
    exhaust_gpu_memory: frozenset({Reason.CUDA_OUT_OF_MEMORY}),
    kill_container: frozenset({Reason.CONTAINER_KILLED}),
    exhaust_host_memory: frozenset({Reason.HOST_OUT_OF_MEMORY}),
    exit_without_result: frozenset({Reason.NO_RESULT}),
}
FAULT_PAIRS = random.Random(24).sample(list(itertools.combinations_with_replacement(FAULT_REASONS, 2)), 30)
INTERVALS_SECONDS = (0.0, 0.01, 0.1, 0.5, 1.0, 2.0)


def run_faults(seed: int, *faults: tuple[float, Incident]) -> HistoryResult:
    """Run a history of two nodes with faults at these times in seconds."""
    incidents = tuple((Trigger(seconds=seconds), fault) for seconds, fault in faults)
    return run_history(Scenario(incidents=incidents), SeededChoices(seed))


@pytest.mark.parametrize("fault", [delete_pod, force_delete_pod, evict_pod, evict_by_kueue, preempt_by_kueue])
def test_a_pod_that_is_removed_at_any_moment_of_its_start_is_named(fault: Incident) -> None:
    histories = [run_faults(step, (step / 10, fault)) for step in range(int(10 * START_SECONDS))]
    reasons = [reason for history in histories for reason in history.failure_reasons[:1]]

    assert [violation for history in histories for violation in history.violations] == []
    assert set(reasons) == FAULT_REASONS[fault]
    assert len(reasons) > 0.9 * len(histories)  # at the first moments, no pod exists


@pytest.mark.parametrize(
    ("first", "second"), FAULT_PAIRS, ids=[f"{first.__name__}-{second.__name__}" for first, second in FAULT_PAIRS]
)
def test_two_faults_in_quick_succession_give_a_verdict_that_names_one_of_them(
    first: Incident, second: Incident
) -> None:
    expected = FAULT_REASONS[first] | FAULT_REASONS[second]
    judged = 0
    for seed, (start, interval) in enumerate(itertools.product((1.0, 4.0, 7.0, 9.0), INTERVALS_SECONDS)):
        history = run_faults(seed, (start, first), (start + interval, second))
        judged += len(history.failure_reasons[:1])

        assert not history.violations
        assert set(history.failure_reasons[:1]) <= expected, "\n".join(history.trace)
    assert judged > 0
