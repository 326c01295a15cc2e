"""Limits the restarts without progress for each fault, and computes the backoff between restarts.

Progress is the highest step in the termination messages of an attempt, never a polled step (decisions/129).
"""

import hashlib
from dataclasses import dataclass
from datetime import timedelta

from finetune_api.v1alpha1.job import RestartPolicy
from finetune_api.v1alpha1.reasons import FailureAction, Reason
from finetune_api.v1alpha1.status import AttemptRecord, Evidence, Fault, RestartCounts
from finetune_operator.failures.verdict import Verdict

INFRASTRUCTURE_FAULTS = (Fault.INFRASTRUCTURE, Fault.PREEMPTION)
MIN_GANG_DELAY_SECONDS = 5  # without a delay, two gangs that each hold a part of one quota would start together again


@dataclass(frozen=True)
class RestartPlan:
    """Decision to start another attempt after `delay`, or to fail the job if `is_allowed` is false."""

    is_allowed: bool
    delay: timedelta
    counts: RestartCounts
    message: str


@dataclass(frozen=True)
class RestartLimits:
    """Uid of a job, which seeds the jitter, its restart policy, and whether its pods start only all together."""

    uid: str
    policy: RestartPolicy
    starts_as_group: bool = False


def plan_restart(
    verdict: Verdict,
    failed_attempt: AttemptRecord,
    earlier_attempts: tuple[AttemptRecord, ...],
    counts: RestartCounts,
    limits: RestartLimits,
) -> RestartPlan:
    """Decide whether and when the next attempt starts after a failed attempt."""
    policy = limits.policy
    final_step = max((evidence.last_step or 0 for evidence in failed_attempt.evidence), default=0)
    has_progressed = final_step > counts.best_step
    if has_progressed:
        counts = RestartCounts(best_step=final_step)
    if verdict.action is FailureAction.FAIL:
        return RestartPlan(False, timedelta(), counts, verdict.message)
    if verdict.action is FailureAction.REPAIR:  # repairs are finite, so they need no budget
        return RestartPlan(True, timedelta(), counts, verdict.message)
    is_unknown_fault = verdict.fault is Fault.UNKNOWN
    if not has_progressed and is_unknown_fault and _has_happened_before(verdict, earlier_attempts):
        message = f"{verdict.message}; the same happened before at step {_get_step(verdict.evidence)}"
        return RestartPlan(False, timedelta(), counts, message)
    # the pods of the next attempt wait until there is room for all of them (decisions/217)
    if verdict.preemptor or (limits.starts_as_group and verdict.reason is Reason.PREEMPTED):
        return RestartPlan(True, timedelta(), counts, verdict.message)
    seed = f"{limits.uid}/{failed_attempt.attempt}"
    if verdict.reason is Reason.GANG_INCOMPLETE:  # the attempt did not fail, but the cluster still lacks resources
        seconds = max(policy.max_backoff_seconds, MIN_GANG_DELAY_SECONDS)
        return RestartPlan(True, _add_jitter(seconds, seed=seed), counts, verdict.message)
    is_infrastructure = verdict.fault in INFRASTRUCTURE_FAULTS
    used_restarts = counts.infrastructure if is_infrastructure else counts.counted
    limit = policy.max_infrastructure_restarts if is_infrastructure else policy.max_restarts
    if used_restarts >= limit:
        field = "maxInfrastructureRestarts" if is_infrastructure else "maxRestarts"
        message = f"restarted {used_restarts} times without progress (restartPolicy.{field}); last: {verdict.message}"
        return RestartPlan(False, timedelta(), counts, message)
    delay = compute_restart_delay(counts.counted + counts.infrastructure, policy, seed=seed)
    update = {"infrastructure": used_restarts + 1} if is_infrastructure else {"counted": used_restarts + 1}
    return RestartPlan(True, delay, counts.model_copy(update=update), verdict.message)


def compute_restart_delay(previous_restarts: int, policy: RestartPolicy, *, seed: str) -> timedelta:
    """Return the delay of a restart: 0 for the first, then backoffSeconds, doubled up to the maximum, plus jitter."""
    if previous_restarts == 0:
        return timedelta()
    seconds = min(policy.backoff_seconds * 2.0 ** min(previous_restarts - 1, 32), policy.max_backoff_seconds)
    return _add_jitter(seconds, seed=seed)


def _add_jitter(seconds: float, *, seed: str) -> timedelta:
    """Return a delay that is up to 20 % longer, depending only on the seed, so that jobs do not restart together."""
    jitter = hashlib.sha256(seed.encode()).digest()[0] / 255 / 5
    return timedelta(seconds=round(seconds * (1 + jitter), 3))


def _has_happened_before(verdict: Verdict, earlier_attempts: tuple[AttemptRecord, ...]) -> bool:
    """Return whether an earlier attempt failed for the same reason at the same rank and step."""
    rank = verdict.evidence.rank if verdict.evidence else None
    return any(
        (record.reason, record.rank, _get_step(_find_cause(record)))
        == (verdict.reason, rank, _get_step(verdict.evidence))
        for record in earlier_attempts
    )


def _find_cause(record: AttemptRecord) -> Evidence | None:
    return next((evidence for evidence in record.evidence if evidence.node_rank == record.node_rank), None)


def _get_step(evidence: Evidence | None) -> int:
    """Return the last step in the termination message of a node; 0 if it left none."""
    return (evidence.last_step if evidence else None) or 0
