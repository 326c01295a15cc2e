"""Tests of restart budgets and restart delays."""

from datetime import timedelta
from typing import Any

import pytest

from finetune_api.v1alpha1.job import RestartPolicy
from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, Evidence, Fault, RestartCounts
from finetune_operator.failures.restart_budget import RestartLimits, RestartPlan, compute_restart_delay, plan_restart
from finetune_operator.failures.verdict import Verdict

Records = tuple[AttemptRecord, ...]


def verdict_with_fault(fault: Fault = Fault.TRANSIENT, *, last_step: int | None = None) -> Verdict:
    reason = next(reason for reason in reversed(Reason) if reason.fault is fault)
    return Verdict(reason=reason, message="m", evidence=Evidence(node_rank=0, rank=1, last_step=last_step))


def attempt_record(*last_steps: int | None, **fields: Any) -> AttemptRecord:
    """Return the record of an attempt whose nodes reported these steps in their termination messages."""
    evidence = tuple(Evidence(node_rank=rank, last_step=step) for rank, step in enumerate(last_steps))
    return AttemptRecord(attempt=0, state=AttemptState.STOPPING, evidence=evidence, node_rank=0, **fields)


def plan_next_restart(
    failure_verdict: Verdict,
    counts: RestartCounts | None = None,
    *,
    last_step: int | None = None,
    earlier_records: Records = (),
) -> RestartPlan:
    return plan_restart(
        failure_verdict,
        attempt_record(last_step),
        earlier_records,
        counts or RestartCounts(),
        RestartLimits("uid", RestartPolicy()),
    )


def test_first_restart_is_immediate_and_later_delays_double_up_to_a_limit() -> None:
    policy = RestartPolicy(backoff_seconds=10, max_backoff_seconds=300)
    delays = [compute_restart_delay(n, policy, seed="s").total_seconds() for n in range(10)]
    assert delays[0] == 0
    for delay, base in zip(delays[1:], (10, 20, 40, 80, 160, 300, 300, 300, 300), strict=True):
        assert base <= delay <= base * 1.2


@pytest.mark.parametrize(("max_backoff_seconds", "delay_seconds"), [(0, 5), (1, 5), (300, 300)])
def test_jobs_that_were_released_together_start_again_at_different_times_and_use_no_restart(
    max_backoff_seconds: int, delay_seconds: int
) -> None:
    incomplete = Verdict(Reason.GANG_INCOMPLETE, "m")
    policy = RestartPolicy(max_backoff_seconds=max_backoff_seconds)
    first, second = (
        plan_restart(incomplete, attempt_record(None), (), RestartCounts(), RestartLimits(uid, policy))
        for uid in ("a", "b")
    )
    assert first.delay != second.delay
    for restart in (first, second):
        assert 1 <= restart.delay.total_seconds() / delay_seconds <= 1.2
        assert restart.counts == RestartCounts()


@pytest.mark.parametrize(
    ("fault", "counts", "is_allowed"),
    [
        pytest.param(Fault.TRANSIENT, {"counted": 2}, True, id="transient within the budget"),
        pytest.param(Fault.TRANSIENT, {"counted": 3}, False, id="transient budget used up"),
        pytest.param(Fault.INFRASTRUCTURE, {"counted": 3}, True, id="infrastructure has its own budget"),
        pytest.param(Fault.PREEMPTION, {"infrastructure": 10}, False, id="infrastructure budget used up"),
    ],
)
def test_each_fault_has_its_own_budget(fault: Fault, counts: dict[str, int], is_allowed: bool) -> None:
    restart = plan_next_restart(verdict_with_fault(fault), RestartCounts(**counts))
    assert restart.is_allowed is is_allowed
    assert is_allowed or "restartPolicy.max" in restart.message


def test_progress_resets_the_budget() -> None:
    restart = plan_next_restart(verdict_with_fault(), RestartCounts(counted=3, best_step=40), last_step=50)
    assert (restart.is_allowed, restart.delay, restart.counts) == (
        True,
        timedelta(),
        RestartCounts(counted=1, best_step=50),
    )


def test_the_highest_step_of_all_nodes_is_progress() -> None:
    record = attempt_record(None, 50, 49)
    restart = plan_restart(
        verdict_with_fault(), record, (), RestartCounts(best_step=40), RestartLimits("uid", RestartPolicy())
    )
    assert restart.counts.best_step == 50


def test_user_errors_and_failures_without_a_repair_cause_no_restart() -> None:
    assert not plan_next_restart(verdict_with_fault(Fault.USER)).is_allowed
    assert not plan_next_restart(Verdict(Reason.CUDA_OUT_OF_MEMORY, "m", no_repair_left=True)).is_allowed
    assert plan_next_restart(Verdict(Reason.CUDA_OUT_OF_MEMORY, "m")).is_allowed


def test_repeated_unexplained_failure_at_the_same_step_fails_the_job() -> None:
    before = attempt_record(7, reason=Reason.UNEXPLAINED, rank=1)
    counts = RestartCounts(best_step=7, counted=1)
    verdict = verdict_with_fault(Fault.UNKNOWN, last_step=7)
    restart = plan_next_restart(verdict, counts, last_step=7, earlier_records=(before,))
    assert not restart.is_allowed
    assert "the same happened before at step 7" in restart.message


def test_unexplained_failures_at_different_steps_are_different() -> None:
    before = attempt_record(5, reason=Reason.UNEXPLAINED, rank=1)
    verdict = verdict_with_fault(Fault.UNKNOWN, last_step=6)
    assert plan_next_restart(verdict, RestartCounts(best_step=7), last_step=6, earlier_records=(before,)).is_allowed


@pytest.mark.parametrize("counts", [RestartCounts(), RestartCounts(counted=2, infrastructure=10)], ids=["none", "all"])
def test_a_preemption_with_a_named_preemptor_uses_no_restart_and_has_no_delay(counts: RestartCounts) -> None:
    preempted = Verdict(Reason.PREEMPTED, "m", preemptor="workload 527a9fa8")
    for _ in range(1000):
        restart = plan_next_restart(preempted, counts)
        assert (restart.is_allowed, restart.delay, restart.counts) == (True, timedelta(), counts)


def test_progress_before_a_preemption_resets_the_budget() -> None:
    preempted = Verdict(Reason.PREEMPTED, "m", preemptor="workload 527a9fa8")
    restart = plan_next_restart(preempted, RestartCounts(counted=3, best_step=40), last_step=50)
    assert restart.counts == RestartCounts(best_step=50)


@pytest.mark.parametrize(("reason", "is_counted"), [(Reason.PREEMPTED, False), (Reason.NODE_LOST, True)])
def test_preemption_of_a_group_uses_no_restart(reason: Reason, is_counted: bool) -> None:
    """The pods of the next attempt start only when there is room for all of them."""
    limits = RestartLimits("uid", RestartPolicy(), starts_as_group=True)

    restart = plan_restart(Verdict(reason, "m"), attempt_record(None), (), RestartCounts(infrastructure=3), limits)

    assert restart.is_allowed
    assert restart.counts.infrastructure == (4 if is_counted else 3)
    assert bool(restart.delay) is is_counted
