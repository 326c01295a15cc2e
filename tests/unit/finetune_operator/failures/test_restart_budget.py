"""Budgets by fault, delays, and what counts as progress."""

from datetime import timedelta
from typing import Any

import pytest

from finetune_api.v1alpha1.job import RestartPolicy
from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, Evidence, Fault, RestartCounts
from finetune_operator.failures.restart_budget import Restart, backoff, plan_restart
from finetune_operator.failures.verdict import Verdict

Records = tuple[AttemptRecord, ...]


def verdict(fault: Fault = Fault.TRANSIENT, **fields: Any) -> Verdict:
    reason = next(reason for reason in reversed(Reason) if reason.fault is fault)
    return Verdict(reason=reason, message="m", evidence=Evidence(node_rank=0, rank=1), **fields)


def record(last_step: int | None = None, **fields: Any) -> AttemptRecord:
    return AttemptRecord(attempt=0, state=AttemptState.STOPPING, last_step=last_step, **fields)


def plan(
    of: Verdict, counts: RestartCounts | None = None, *, last_step: int | None = None, earlier: Records = ()
) -> Restart:
    return plan_restart(of, record(last_step), earlier, counts or RestartCounts(), ("uid", RestartPolicy()))


def test_the_first_restart_is_immediate_and_later_ones_double_up_to_the_limit() -> None:
    policy = RestartPolicy(backoff_seconds=10, max_backoff_seconds=300)
    delays = [backoff(n, policy, seed="s").total_seconds() for n in range(10)]
    assert delays[0] == 0
    for delay, base in zip(delays[1:], (10, 20, 40, 80, 160, 300, 300, 300, 300), strict=True):
        assert base <= delay <= base * 1.2


def test_the_jitter_is_fixed_by_the_seed() -> None:
    policy = RestartPolicy()
    assert backoff(2, policy, seed="a") == backoff(2, policy, seed="a") != backoff(2, policy, seed="b")


@pytest.mark.parametrize(
    ("fault", "counts", "again"),
    [
        pytest.param(Fault.TRANSIENT, {"counted": 2}, True, id="transient within the budget"),
        pytest.param(Fault.TRANSIENT, {"counted": 3}, False, id="transient budget spent"),
        pytest.param(Fault.INFRASTRUCTURE, {"counted": 3}, True, id="lost nodes do not count against the user"),
        pytest.param(Fault.PREEMPTION, {"infrastructure": 10}, False, id="but they end too"),
    ],
)
def test_budgets_are_kept_by_fault(fault: Fault, counts: dict[str, int], again: bool) -> None:
    restart = plan(verdict(fault), RestartCounts(**counts))
    assert restart.again is again
    assert again or "restartPolicy.max" in restart.message


def test_progress_gives_the_budget_back() -> None:
    restart = plan(verdict(), RestartCounts(counted=3, best_step=40), last_step=50)
    assert (restart.again, restart.delay, restart.counts) == (True, timedelta(), RestartCounts(counted=1, best_step=50))


def test_reaching_the_same_step_again_is_no_progress() -> None:
    assert not plan(verdict(), RestartCounts(counted=3, best_step=40), last_step=40).again


def test_a_users_error_is_never_retried() -> None:
    assert not plan(verdict(Fault.USER)).again
    assert not plan(Verdict(Reason.CUDA_OUT_OF_MEMORY, "m", helpless=True)).again
    assert plan(Verdict(Reason.CUDA_OUT_OF_MEMORY, "m")).again


def test_the_same_unexplained_failure_at_the_same_step_ends_the_job() -> None:
    before = record(7, reason=Reason.UNEXPLAINED, rank=1)
    counts = RestartCounts(best_step=7, counted=1)
    restart = plan(verdict(Fault.UNKNOWN), counts, last_step=7, earlier=(before,))
    assert not restart.again
    assert "the same happened before at step 7" in restart.message
