"""The predicates from which the phase of a job is derived; test_conditions.py tests phases of whole jobs."""

from finetune_api.v1alpha1.status import AttemptState
from finetune_operator.core.phase import is_suspended
from testing.builders.jobs import job
from testing.builders.statuses import finished_status, status_with_attempts


def test_a_job_is_suspended_only_if_the_spec_sets_it_and_no_pod_is_left() -> None:
    suspended_job, active_job = job(suspend=True), job()
    assert is_suspended(suspended_job, status_with_attempts(AttemptState.STOPPED))
    assert not is_suspended(suspended_job, status_with_attempts(AttemptState.STOPPING))
    assert not is_suspended(active_job, status_with_attempts(AttemptState.STOPPED))
    assert not is_suspended(suspended_job, finished_status(AttemptState.SUCCEEDED))
