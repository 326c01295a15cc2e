"""Tests that a wrong operator clock does not delay a job."""

from datetime import timedelta

from finetune_api.v1alpha1.status import AttemptRecord, AttemptState
from finetune_operator.core.actions import Create
from finetune_operator.core.attempt_record import record_downtime
from finetune_operator.core.pending_reasons import IMAGE_PULL_TIMEOUT
from finetune_operator.observation.pods import Observation, RejectedCreate
from testing.builders.jobs import NOW, build_observation, decide_once, decide_with, finished_pod, job, pod, running_pod

NOTHING = Observation(is_fresh=True)
AHEAD = NOW + timedelta(hours=5)
BEHIND = NOW - timedelta(hours=5)
MINUTE = timedelta(minutes=1)


def test_restart_delay_recorded_by_a_fast_clock_is_ignored() -> None:
    ftjob, _ = decide_once(job(restartPolicy={"backoffSeconds": 30}), NOTHING)
    for attempt in range(2):  # two failures, because only the second restart is delayed
        failed = build_observation(
            ftjob, finished_pod(ftjob, 0, attempt=attempt, exit_code=137), running_pod(ftjob, 1, attempt=attempt)
        )
        for observation in (failed, NOTHING):
            ftjob, _ = decide_once(ftjob, observation, now=AHEAD)
    record = ftjob.status.attempts[-1]
    assert record.not_before is not None
    assert record.not_before > AHEAD

    assert not any(isinstance(action, Create) for action in decide_once(ftjob, NOTHING, now=AHEAD)[1].actions)
    assert any(isinstance(action, Create) for action in decide_once(ftjob, NOTHING, now=NOW)[1].actions)


def test_future_start_of_a_pending_reason_is_reset_to_now() -> None:
    rejected = Observation(is_fresh=True, rejected_creates=(RejectedCreate("Pod", "bert-0-0", 403, "exceeded quota"),))
    ftjob, _ = decide_once(decide_once(job(), NOTHING)[0], rejected, now=AHEAD)
    assert ftjob.status.waiting is not None
    assert ftjob.status.waiting.since == AHEAD

    ftjob, _ = decide_once(ftjob, rejected)
    assert ftjob.status.waiting is not None
    assert ftjob.status.waiting.since == NOW


def test_pending_reason_recorded_by_a_slow_clock_does_not_shorten_the_timeout() -> None:
    ftjob, _ = decide_once(job(), NOTHING, now=BEHIND)
    state = {"waiting": {"reason": "ErrImagePull", "message": "not found"}}
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": NOW.isoformat()}
    pending_pods = [
        pod(ftjob, rank, conditions=[scheduled], containerStatuses=[{"name": "trainer", "state": state}])
        for rank in (0, 1)
    ]
    ftjob, slow = decide_with(ftjob, *pending_pods, now=BEHIND)
    assert slow.requeue_after == IMAGE_PULL_TIMEOUT

    ftjob, corrected = decide_with(ftjob, *pending_pods, now=NOW + MINUTE)
    assert (ftjob.status.attempts[0].state, corrected.requeue_after) == (
        AttemptState.STARTING,
        IMAGE_PULL_TIMEOUT - MINUTE,
    )
    ftjob, _ = decide_with(ftjob, *pending_pods, now=NOW + IMAGE_PULL_TIMEOUT)
    assert ftjob.status.attempts[0].state is AttemptState.STOPPING


def test_future_suspend_time_adds_no_suspended_seconds() -> None:
    ftjob, _ = decide_once(job(), NOTHING)
    suspended_job = ftjob.model_copy(update={"spec": ftjob.spec.model_copy(update={"suspend": True})})
    for _ in range(2):
        suspended_job, _ = decide_once(suspended_job, NOTHING, now=AHEAD)
    assert suspended_job.status.suspend_time == AHEAD

    resumed, _ = decide_once(suspended_job.model_copy(update={"spec": ftjob.spec}), NOTHING)
    assert (resumed.status.attempt, resumed.status.suspended_seconds) == (1, 0)


def test_downtime_is_never_negative() -> None:
    first = AttemptRecord(attempt=0, state=AttemptState.FAILED, first_step_time=NOW, end_time=AHEAD, last_step=3)
    following = AttemptRecord(attempt=1, state=AttemptState.RUNNING, first_step=3, first_step_time=NOW)
    assert record_downtime((first,), following)[0].downtime_seconds == 0
