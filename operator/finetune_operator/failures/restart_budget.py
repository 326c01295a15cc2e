"""Whether and when a failed attempt is tried again: budgets by fault, kept since the job last got further."""

import hashlib
from dataclasses import dataclass
from datetime import timedelta

from finetune_api.v1alpha1.job import RestartPolicy
from finetune_api.v1alpha1.reasons import FailureAction, Reason
from finetune_api.v1alpha1.status import AttemptRecord, Fault, RestartCounts
from finetune_operator.failures.verdict import Verdict

UNCOUNTED = (Fault.INFRASTRUCTURE, Fault.PREEMPTION)


@dataclass(frozen=True)
class Restart:
    """What follows from a verdict: another attempt after `delay`, or the end, and why."""

    again: bool
    delay: timedelta
    counts: RestartCounts
    message: str


def plan_restart(
    verdict: Verdict,
    ended: AttemptRecord,
    earlier: tuple[AttemptRecord, ...],
    counts: RestartCounts,
    job: tuple[str, RestartPolicy],
) -> Restart:
    """Weigh a verdict against the limits. `job` is its uid, which seeds the jitter, and its policy."""
    uid, policy = job
    reached = ended.last_step or 0
    progressed = reached > counts.best_step
    if progressed:
        counts = RestartCounts(best_step=reached)
    if verdict.action is FailureAction.FAIL:
        return Restart(False, timedelta(), counts, verdict.message)
    if verdict.action is FailureAction.REPAIR:  # there are only so many; the next attempt is another job, so to speak
        return Restart(True, timedelta(), counts, verdict.message)
    if not progressed and verdict.fault is Fault.UNKNOWN and _seen_before(verdict, reached, earlier):
        return Restart(False, timedelta(), counts, f"{verdict.message}; the same happened before at step {reached}")
    if verdict.reason is Reason.GANG_INCOMPLETE:  # no failure: there is no room yet
        return Restart(True, timedelta(seconds=policy.max_backoff_seconds), counts, verdict.message)
    infrastructure = verdict.fault in UNCOUNTED
    spent = counts.infrastructure if infrastructure else counts.counted
    limit = policy.max_infrastructure_restarts if infrastructure else policy.max_restarts
    if spent >= limit:
        field = "maxInfrastructureRestarts" if infrastructure else "maxRestarts"
        message = f"restarted {spent} times without progress (restartPolicy.{field}); last: {verdict.message}"
        return Restart(False, timedelta(), counts, message)
    delay = backoff(counts.counted + counts.infrastructure, policy, seed=f"{uid}/{ended.attempt}")
    spent_now = {"infrastructure": spent + 1} if infrastructure else {"counted": spent + 1}
    return Restart(True, delay, counts.model_copy(update=spent_now), verdict.message)


def backoff(restarts_before: int, policy: RestartPolicy, *, seed: str) -> timedelta:
    """0, then backoffSeconds doubled each time up to the maximum, with up to a fifth of jitter, fixed by the seed."""
    if restarts_before == 0:
        return timedelta()
    seconds = min(policy.backoff_seconds * 2.0 ** min(restarts_before - 1, 32), policy.max_backoff_seconds)
    share = hashlib.sha256(seed.encode()).digest()[0] / 255
    return timedelta(seconds=round(seconds * (1 + share / 5), 3))


def _seen_before(verdict: Verdict, reached: int, earlier: tuple[AttemptRecord, ...]) -> bool:
    rank = verdict.evidence.rank if verdict.evidence else None
    return any(
        (record.reason, record.rank, record.last_step or 0) == (verdict.reason, rank, reached) for record in earlier
    )
