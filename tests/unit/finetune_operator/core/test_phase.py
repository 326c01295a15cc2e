"""Tests of the predicates for the phase of a job; test_conditions.py tests derive_phase."""

from finetune_api.v1alpha1.status import AttemptState
from finetune_operator.core.phase import is_suspended
from testing.builders.jobs import job
from testing.builders.statuses import build_finished_status, build_status_with_attempts


def test_job_is_suspended_only_if_suspend_is_set_and_no_pod_is_left() -> None:
    suspended_job, active_job = job(suspend=True), job()
    assert is_suspended(suspended_job, build_status_with_attempts(AttemptState.STOPPED))
    assert not is_suspended(suspended_job, build_status_with_attempts(AttemptState.STOPPING))
    assert not is_suspended(active_job, build_status_with_attempts(AttemptState.STOPPED))
    assert not is_suspended(suspended_job, build_finished_status(AttemptState.SUCCEEDED))
