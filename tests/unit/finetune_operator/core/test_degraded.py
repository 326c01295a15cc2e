"""Tests that suspend, cancel, active deadline and TTL also apply to jobs that cannot be reconciled."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from finetune_api.v1alpha1.job import GRACE_SECONDS
from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, JobStatus, Phase
from finetune_operator import names
from finetune_operator.core.actions import DeleteJob, DeletePod, DeleteWorkload
from finetune_operator.core.decision import Decision
from finetune_operator.core.degraded import MAX_PROBLEM_CHARACTERS, decide_degraded
from testing.builders.jobs import NOW, SETTINGS, finished_pod, job, running_pod, terminating_pod

JOB = job()
RUNNING = JobStatus(
    start_time=NOW, attempt=0, attempts=(AttemptRecord(attempt=0, state=AttemptState.RUNNING, created=True),)
)
PODS = (running_pod(JOB, 0), running_pod(JOB, 1))


def decide(status: JobStatus = RUNNING, *, seconds: float = 0, problem: str = "ValueError: x", **spec: Any) -> Decision:
    """Return the decision for a job with this raw spec, `seconds` after its start."""
    body = {"metadata": {"uid": "uid-1", "generation": 3}, "spec": spec}
    return decide_degraded(body, status, PODS, NOW + timedelta(seconds=seconds), problem=problem, settings=SETTINGS)


def test_pods_keep_running_and_a_condition_reports_the_problem() -> None:
    decision = decide(problem="x" * 10_000)

    assert decision.actions == ()
    assert decision.requeue_after is not None
    [stalled] = decision.status.conditions
    assert (stalled.type, stalled.status, stalled.reason) == ("Stalled", "True", "ReconcileFailed")
    assert len(stalled.message) < MAX_PROBLEM_CHARACTERS + 200


def test_second_decision_does_not_change_the_status() -> None:
    first = decide()

    assert decide(first.status, seconds=60).status == first.status


def test_suspend_deletes_running_pods_with_their_grace_period() -> None:
    pods = (running_pod(JOB, 0), terminating_pod(running_pod(JOB, 1)), finished_pod(JOB, 1, attempt=1))
    body = {"metadata": {"uid": "uid-1"}, "spec": {"suspend": True}}

    decision = decide_degraded(body, RUNNING, pods, NOW, problem="x", settings=SETTINGS)

    assert decision.actions == (DeletePod("bert-0-0", "pod-0-0", GRACE_SECONDS),)


@pytest.mark.parametrize(
    ("value", "seconds"), [(3600, 3600), (10**30, 120), (-1, 120), (0, 120), ("60", 120), (None, 120)]
)
def test_pods_keep_the_grace_period_of_the_spec_if_it_is_valid(value: object, seconds: int) -> None:
    decision = decide(suspend=True, terminationGracePeriodSeconds=value)

    assert [action.grace_seconds for action in decision.actions if isinstance(action, DeletePod)] == [seconds] * 2


def test_the_active_deadline_fails_the_job() -> None:
    assert decide(activeDeadlineSeconds=60, seconds=59).status.completion_time is None
    decision = decide(activeDeadlineSeconds=60, seconds=60)

    assert (decision.status.phase, decision.status.attempts[-1].state) == (Phase.FAILED, AttemptState.FAILED)
    assert [type(action).__name__ for action in decision.actions] == ["DeletePod", "DeletePod", "EmitEvent"]


def test_cancel_fails_the_job() -> None:
    assert decide(cancel="true").status.completion_time is None
    decision = decide(cancel=True)

    record = decision.status.attempts[-1]
    assert (decision.status.phase, record.state, record.reason) == (Phase.FAILED, AttemptState.FAILED, "Cancelled")
    assert [type(action).__name__ for action in decision.actions] == ["DeletePod", "DeletePod", "EmitEvent"]


@pytest.mark.parametrize(("own_ttl", "deleted_at"), [(None, 60), (30, 30), (90, 90)], ids=["unset", "less", "more"])
def test_default_ttl_applies_unless_the_job_has_its_own(own_ttl: int | None, deleted_at: int) -> None:
    finished, settings = RUNNING.model_copy(update={"completion_time": NOW}), replace(SETTINGS, default_ttl_seconds=60)
    body = {"metadata": {"uid": "uid-1"}, "spec": {} if own_ttl is None else {"ttlSecondsAfterFinished": own_ttl}}

    for seconds in (deleted_at - 1, deleted_at):
        now = NOW + timedelta(seconds=seconds)
        decision = decide_degraded(body, finished, (), now, problem="x", settings=settings)
        assert (DeleteJob("uid-1") in decision.actions) is (seconds == deleted_at)
        without_deletion = replace(settings, delete_finished_jobs=False)
        assert not decide_degraded(body, finished, (), now, problem="x", settings=without_deletion).actions


@pytest.mark.parametrize("value", ["60", -1, 10**30, 1.5, True, None, {"a": 1}])
def test_time_limit_with_an_invalid_type_or_value_is_ignored(value: object) -> None:
    decision = decide(activeDeadlineSeconds=value, ttlSecondsAfterFinished=value, suspend="true", seconds=1e6)

    assert decision.actions == ()


@pytest.mark.parametrize(("is_running", "released"), [(True, ()), (False, (DeleteWorkload("bert-uid-1"),))])
def test_suspended_job_returns_its_quota_once_no_pod_runs(
    is_running: bool, released: tuple[DeleteWorkload, ...]
) -> None:
    pods = (running_pod(JOB, 0) if is_running else finished_pod(JOB, 0), finished_pod(JOB, 1))
    for pod in pods:
        pod["metadata"]["finalizers"] = [names.KUEUE_FINALIZER]
    body = {"metadata": {"name": "bert", "uid": "uid-1"}, "spec": {"suspend": True}}

    decision = decide_degraded(body, RUNNING, pods, NOW, problem="x", settings=SETTINGS)

    assert tuple(action for action in decision.actions if isinstance(action, DeleteWorkload)) == released
