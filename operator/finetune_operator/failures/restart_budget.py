"""Restart budgets: how many restarts without progress each kind of fault may use, and the backoff between them."""

import hashlib
from dataclasses import dataclass
from datetime import timedelta

from finetune_api.v1alpha1.job import RestartPolicy
from finetune_api.v1alpha1.reasons import FailureAction, Reason
from finetune_api.v1alpha1.status import AttemptRecord, Fault, RestartCounts
from finetune_operator.failures.verdict import Verdict

INFRASTRUCTURE_FAULTS = (Fault.INFRASTRUCTURE, Fault.PREEMPTION)


@dataclass(frozen=True)
class RestartPlan:
    """What follows a verdict: another attempt after `delay`, or, if not `allowed`, the end of the job."""

    allowed: bool
    delay: timedelta
    counts: RestartCounts
    message: str


def plan_restart(
    verdict: Verdict,
    failed: AttemptRecord,
    earlier: tuple[AttemptRecord, ...],
    counts: RestartCounts,
    job: tuple[str, RestartPolicy],
) -> RestartPlan:
    """Return whether and when a failed attempt is restarted.

    `job`: the uid, which seeds the jitter, and the restart policy.
    """
    uid, policy = job
    last_step = failed.last_step or 0
    progressed = last_step > counts.best_step
    if progressed:
        counts = RestartCounts(best_step=last_step)
    if verdict.action is FailureAction.FAIL:
        return RestartPlan(False, timedelta(), counts, verdict.message)
    if verdict.action is FailureAction.REPAIR:  # repairs are finite, so they need no budget
        return RestartPlan(True, timedelta(), counts, verdict.message)
    if not progressed and verdict.fault is Fault.UNKNOWN and _has_happened_before(verdict, last_step, earlier):
        message = f"{verdict.message}; the same happened before at step {last_step}"
        return RestartPlan(False, timedelta(), counts, message)
    if verdict.reason is Reason.GANG_INCOMPLETE:  # not a failure: not enough free resources yet
        return RestartPlan(True, timedelta(seconds=policy.max_backoff_seconds), counts, verdict.message)
    is_infrastructure = verdict.fault in INFRASTRUCTURE_FAULTS
    used = counts.infrastructure if is_infrastructure else counts.counted
    limit = policy.max_infrastructure_restarts if is_infrastructure else policy.max_restarts
    if used >= limit:
        field = "maxInfrastructureRestarts" if is_infrastructure else "maxRestarts"
        message = f"restarted {used} times without progress (restartPolicy.{field}); last: {verdict.message}"
        return RestartPlan(False, timedelta(), counts, message)
    delay = restart_delay(counts.counted + counts.infrastructure, policy, seed=f"{uid}/{failed.attempt}")
    update = {"infrastructure": used + 1} if is_infrastructure else {"counted": used + 1}
    return RestartPlan(True, delay, counts.model_copy(update=update), verdict.message)


def restart_delay(restarts_before: int, policy: RestartPolicy, *, seed: str) -> timedelta:
    """Return the delay before a restart: 0 for the first, then backoffSeconds, doubled each time up to the maximum.

    The delay has up to 20 % of jitter, which the seed determines.
    """
    if restarts_before == 0:
        return timedelta()
    seconds = min(policy.backoff_seconds * 2.0 ** min(restarts_before - 1, 32), policy.max_backoff_seconds)
    jitter = hashlib.sha256(seed.encode()).digest()[0] / 255 / 5
    return timedelta(seconds=round(seconds * (1 + jitter), 3))


def _has_happened_before(verdict: Verdict, last_step: int, earlier: tuple[AttemptRecord, ...]) -> bool:
    rank = verdict.evidence.rank if verdict.evidence else None
    return any(
        (record.reason, record.rank, record.last_step or 0) == (verdict.reason, rank, last_step) for record in earlier
    )
