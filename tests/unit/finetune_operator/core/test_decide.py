"""Tests of decide() during the lifecycle of a job."""

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.status import AttemptState, JobStatus
from finetune_operator.core.actions import Create, DeleteJob, DeletePod, EmitEvent
from finetune_operator.core.pending_reasons import CREATE_CONTAINER_TIMEOUT, IMAGE_PULL_TIMEOUT
from finetune_operator.observation.pods import Observation
from testing.builders.jobs import (
    NOW,
    SETTINGS,
    build_observation,
    decide_once,
    decide_with,
    finished_pod,
    job,
    pod,
    running_pod,
    terminating_pod,
)
from testing.builders.stopping import build_running_job

NOTHING = Observation(is_fresh=True)


def termination_message(outcome: str, **fields: Any) -> str:
    return json.dumps({"final": True, "outcome": outcome, **fields})


def started_job(**fields: Any) -> FineTuneJob:
    """Return a job whose attempt 0 has started."""
    return decide_once(job(**fields), NOTHING)[0]


def find_condition(status: JobStatus, condition_type: str) -> str:
    return next((c.status for c in status.conditions if c.type == condition_type), "absent")


def test_the_attempt_is_recorded_before_children_are_created() -> None:
    ftjob, decision = decide_once(job(), NOTHING)
    assert (ftjob.status.attempt, decision.actions) == (0, ())


def test_job_is_running_when_all_nodes_run() -> None:
    ftjob = started_job()
    one_running, _ = decide_with(ftjob, running_pod(ftjob, 0), pod(ftjob, 1))
    assert find_condition(one_running.status, "Running") == "False"
    all_running, decision = decide_with(one_running, running_pod(ftjob, 0), running_pod(ftjob, 1))
    assert find_condition(all_running.status, "Running") == "True"
    assert find_condition(all_running.status, "Reconciling") == "absent"
    assert [a.reason for a in decision.actions if isinstance(a, EmitEvent)] == ["Running"]


def test_remaining_pods_are_deleted_before_the_verdict_on_a_failed_node() -> None:
    ftjob = build_running_job()
    failed = finished_pod(ftjob, 1, message=termination_message("failed", errorType="RankKilled", signal=9, rank=3))
    stopping, decision = decide_with(ftjob, running_pod(ftjob, 0), failed)
    assert (stopping.status.attempts[-1].state, decision.actions) == (AttemptState.STOPPING, ())

    deleting, decision = decide_with(stopping, running_pod(ftjob, 0), failed)
    assert decision.actions == (DeletePod("bert-0-0", "pod-0-0", 10),)

    judged, decision = decide_with(deleting, failed, tombstones=(terminating_pod(running_pod(ftjob, 0)),))
    old, new = judged.status.attempts
    assert (old.reason, old.rank, old.node_rank, new.attempt, new.not_before) == ("RankKilled", 3, 1, 1, None)
    assert [a.reason for a in decision.actions if isinstance(a, EmitEvent)] == ["RankKilled"]


def test_no_pod_is_created_while_older_pods_may_run() -> None:
    ftjob = build_running_job()
    record = ftjob.status.attempts[-1].model_copy(
        update={"attempt": 1, "state": AttemptState.STARTING, "created": False}
    )
    ftjob = ftjob.model_copy(update={"status": ftjob.status.model_copy(update={"attempt": 1, "attempts": (record,)})})
    _, waiting = decide_with(ftjob, terminating_pod(running_pod(ftjob, 0)))
    assert not any(isinstance(action, Create) for action in waiting.actions)
    _, continued = decide_with(ftjob, finished_pod(ftjob, 0))
    assert any(isinstance(action, Create) for action in continued.actions)


def test_a_job_is_complete_when_every_node_reports_success() -> None:
    ftjob = build_running_job()
    success, no_message = termination_message("succeeded"), ""
    completed, _ = decide_with(ftjob, *(finished_pod(ftjob, rank, exit_code=0, message=success) for rank in (0, 1)))
    assert (find_condition(completed.status, "Complete"), find_condition(completed.status, "Finished")) == (
        "True",
        "True",
    )
    incomplete, _ = decide_with(
        ftjob,
        finished_pod(ftjob, 0, exit_code=0, message=success),
        finished_pod(ftjob, 1, exit_code=0, message=no_message),
    )
    assert incomplete.status.attempts[-1].state is AttemptState.STOPPING


def test_missing_pod_counts_as_deleted_only_after_an_uncached_list() -> None:
    ftjob = build_running_job()
    assert decide_with(ftjob, running_pod(ftjob, 0), is_fresh=False)[1].needs_confirmation
    after_loss, decision = decide_with(ftjob, running_pod(ftjob, 0))
    assert not decision.needs_confirmation
    assert after_loss.status.attempts[-1].evidence[1].deleted


def test_suspended_is_true_only_after_all_pods_are_deleted() -> None:
    ftjob = build_running_job()
    suspended_job = ftjob.model_copy(update={"spec": ftjob.spec.model_copy(update={"suspend": True})})
    stopping, _ = decide_with(suspended_job, running_pod(ftjob, 0), running_pod(ftjob, 1))
    before_release, decision = decide_with(stopping, running_pod(ftjob, 0), running_pod(ftjob, 1))
    assert [a.grace_seconds for a in decision.actions if isinstance(a, DeletePod)] == [120, 120]
    assert find_condition(before_release.status, "Suspended") == "False"
    released, _ = decide_with(before_release)
    assert find_condition(released.status, "Suspended") == "True"
    assert released.status.restarts == 0


def test_resumed_job_starts_the_next_attempt_and_its_deadline_excludes_the_pause() -> None:
    ftjob = build_running_job()
    suspended_job = ftjob.model_copy(update={"spec": ftjob.spec.model_copy(update={"suspend": True})})
    for observation in (
        build_observation(ftjob, running_pod(ftjob, 0), running_pod(ftjob, 1)),
        build_observation(ftjob),
    ):
        suspended_job, _ = decide_once(suspended_job, observation)
    unsuspended_job = suspended_job.model_copy(update={"spec": ftjob.spec})
    resumed, _ = decide_with(unsuspended_job, now=NOW + timedelta(seconds=90))
    assert (resumed.status.attempt, resumed.status.suspended_seconds, resumed.status.restarts) == (1, 90, 0)


def test_job_is_requeued_at_the_active_deadline_and_then_fails() -> None:
    ftjob = build_running_job(activeDeadlineSeconds=60)
    pods = (running_pod(ftjob, 0), running_pod(ftjob, 1))
    assert decide_with(ftjob, *pods)[1].requeue_after == timedelta(seconds=60)
    stopping, _ = decide_with(ftjob, *pods, now=NOW + timedelta(seconds=60))
    failed, _ = decide_with(stopping, now=NOW + timedelta(seconds=61))
    assert (failed.status.attempts[-1].reason, failed.status.attempts[-1].fault) == ("DeadlineExceeded", "user")
    assert find_condition(failed.status, "Stalled") == "True"


def cancel(ftjob: FineTuneJob) -> FineTuneJob:
    return ftjob.model_copy(update={"spec": ftjob.spec.model_copy(update={"cancel": True})})


def test_cancelled_job_saves_a_checkpoint_and_fails_once_its_pods_are_gone() -> None:
    ftjob = cancel(build_running_job())
    pods = (running_pod(ftjob, 0), running_pod(ftjob, 1))
    stopping, _ = decide_with(ftjob, *pods)
    stopping, decision = decide_with(stopping, *pods)
    assert [a.grace_seconds for a in decision.actions if isinstance(a, DeletePod)] == [120, 120]
    assert (stopping.status.completion_time, stopping.status.phase) == (None, "Running")

    ended, decision = decide_with(stopping)

    record = ended.status.attempts[-1]
    assert (ended.status.phase, record.reason, record.fault) == ("Failed", "Cancelled", "user")
    assert find_condition(ended.status, "Finished") == "True"
    assert [a.reason for a in decision.actions if isinstance(a, EmitEvent)] == ["Cancelled"]


def test_suspended_job_can_be_cancelled_and_its_attempt_keeps_its_end() -> None:
    ftjob = build_running_job(suspend=False)
    suspended = ftjob.model_copy(update={"spec": ftjob.spec.model_copy(update={"suspend": True})})
    for pods in ((running_pod(ftjob, 0), running_pod(ftjob, 1)), ()):
        suspended, _ = decide_with(suspended, *pods)
    assert suspended.status.attempts[-1].state is AttemptState.STOPPED

    later = NOW + timedelta(hours=1)
    ended, _ = decide_with(cancel(suspended), now=later)

    assert (ended.status.phase, ended.status.attempts[-1].reason) == ("Failed", "Cancelled")
    assert (ended.status.attempts[-1].end_time, ended.status.completion_time) == (NOW, later)


@pytest.mark.parametrize(("own_ttl", "deleted_at"), [(None, 60), (30, 30), (90, 90)], ids=["unset", "less", "more"])
def test_default_ttl_of_the_operator_applies_unless_the_job_has_its_own(own_ttl: int | None, deleted_at: int) -> None:
    settings = replace(SETTINGS, default_ttl_seconds=60)
    ftjob = build_running_job(ttlSecondsAfterFinished=own_ttl)
    success = [finished_pod(ftjob, rank, exit_code=0, message=termination_message("succeeded")) for rank in (0, 1)]
    completed, decision = decide_with(ftjob, *success, settings=settings)
    assert decision.requeue_after == timedelta(seconds=deleted_at)
    for seconds in (deleted_at - 1, deleted_at):
        now = NOW + timedelta(seconds=seconds)
        _, decision = decide_with(completed, *success, now=now, settings=settings)
        assert decision.actions == ((DeleteJob(ftjob.metadata.uid),) if seconds == deleted_at else ())


@pytest.mark.parametrize(("ttl", "restrictions"), [(None, []), (60, ["TtlIgnored"])], ids=["without TTL", "with TTL"])
def test_an_operator_that_deletes_no_jobs_states_that_it_ignores_a_ttl(
    ttl: int | None, restrictions: list[str]
) -> None:
    settings = replace(SETTINGS, delete_finished_jobs=False)
    ftjob = build_running_job(ttlSecondsAfterFinished=ttl)
    success = [finished_pod(ftjob, rank, exit_code=0, message=termination_message("succeeded")) for rank in (0, 1)]
    running, _ = decide_with(ftjob, running_pod(ftjob, 0), settings=settings)
    completed, _ = decide_with(ftjob, *success, settings=settings)
    later = NOW + timedelta(days=1)
    cleaned, decision = decide_with(completed, *success, now=later, settings=settings)

    assert decision.actions == ()
    assert cleaned.status == completed.status
    for state in (running, completed):
        found = [c.reason for c in state.status.conditions if c.type == "OperatorRestricted"]
        assert found == restrictions


def test_job_stopped_early_is_complete_and_reports_the_kept_weights() -> None:
    ftjob = build_running_job()
    message = (
        "stopped early at step 40 of 300: 3 evaluations without a better eval_loss; the weights are those of step 25"
    )
    progress = {"step": 40, "totalSteps": 300, "stoppedEarly": True, "ended": message}
    messages = (termination_message("succeeded", progress=progress), termination_message("succeeded"))

    completed, decision = decide_with(
        ftjob, *(finished_pod(ftjob, rank, exit_code=0, message=messages[rank]) for rank in (0, 1))
    )

    complete = next(c for c in completed.status.conditions if c.type == "Complete")
    assert (complete.status, complete.message) == ("True", f"the result is in models:default/bert/result; {message}")
    assert [action.message for action in decision.actions if isinstance(action, EmitEvent)] == [complete.message]
    assert completed.status.display is not None
    assert completed.status.display.progress == "stopped early 40/300"


def test_pods_of_a_finished_job_are_deleted_without_changing_its_status() -> None:
    ftjob = build_running_job()
    completed, _ = decide_with(
        ftjob, *(finished_pod(ftjob, rank, exit_code=0, message=termination_message("succeeded")) for rank in (0, 1))
    )
    later_job, decision = decide_with(completed, running_pod(ftjob, 0), now=NOW + timedelta(days=1))
    assert later_job.status == completed.status
    assert decision.actions == (DeletePod("bert-0-0", "pod-0-0", 10),)


def test_an_image_that_cannot_be_pulled_fails_the_job_after_ten_minutes() -> None:
    ftjob = started_job()
    state = {"waiting": {"reason": "ErrImagePull", "message": "not found"}}
    pending_pods = [pod(ftjob, rank, containerStatuses=[{"name": "trainer", "state": state}]) for rank in (0, 1)]
    waiting, decision = decide_with(ftjob, *pending_pods)
    assert waiting.status.waiting is not None
    assert waiting.status.waiting.reason == "ImagePullFailed"
    assert decision.requeue_after == IMAGE_PULL_TIMEOUT
    stopping, _ = decide_with(waiting, *pending_pods, now=NOW + IMAGE_PULL_TIMEOUT)
    failed, _ = decide_with(stopping, now=NOW + IMAGE_PULL_TIMEOUT)
    assert failed.status.attempts[-1].reason == "ImagePullFailed"
    assert failed.status.restarts == 0


@pytest.mark.parametrize(
    ("message", "is_restarted", "reason"),
    [
        ("context deadline exceeded", True, "ContainerRuntimeError"),
        ("no command specified", False, "StartError"),
    ],
)
def test_a_container_that_cannot_be_created_ends_the_attempt_after_three_minutes(
    message: str, is_restarted: bool, reason: str
) -> None:
    ftjob = started_job()
    state = {"waiting": {"reason": "CreateContainerError", "message": message}}
    pods = (running_pod(ftjob, 0), pod(ftjob, 1, containerStatuses=[{"name": "trainer", "state": state}]))
    waiting, decision = decide_with(ftjob, *pods)
    assert waiting.status.waiting is not None
    assert waiting.status.waiting.reason == "CreateContainerError"
    assert waiting.status.waiting.message.startswith(f"bert-0-1 on gpu-1: {message}; its kubelet retries")
    assert decision.requeue_after == CREATE_CONTAINER_TIMEOUT

    timed_out, _ = decide_with(waiting, *pods, now=NOW + CREATE_CONTAINER_TIMEOUT)
    ended_attempt = timed_out.status.attempts[0]
    assert (ended_attempt.reason, ended_attempt.node_rank, ended_attempt.k8s_node) == (reason, 1, "gpu-1")
    assert (timed_out.status.completion_time is None) is is_restarted
    _, following = decide_with(timed_out, *pods, now=NOW + CREATE_CONTAINER_TIMEOUT)
    assert [action.name for action in following.actions if isinstance(action, DeletePod)] == ["bert-0-0", "bert-0-1"]


def test_observed_generation_is_updated_if_the_spec_of_a_finished_job_is_edited() -> None:
    """kubectl wait and kstatus compare the generation of status and conditions with that of the object."""
    ftjob = build_running_job()
    message = json.dumps({"final": True, "outcome": "succeeded"})
    pods = [finished_pod(ftjob, rank, exit_code=0, message=message) for rank in (0, 1)]
    finished, _ = decide_with(ftjob, *pods)
    edited = finished.model_copy(update={"metadata": finished.metadata.model_copy(update={"generation": 7})})
    acknowledged, _ = decide_with(edited)

    assert finished.status.completion_time is not None
    assert acknowledged.status.observed_generation == 7
    assert {condition.observed_generation for condition in acknowledged.status.conditions} == {7}
    assert {c.last_transition_time for c in acknowledged.status.conditions} == {
        c.last_transition_time for c in finished.status.conditions
    }
