"""What follows from what is seen, step by step; each test is one fact of a job's life."""

import json
from datetime import timedelta
from typing import Any

import pytest

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.status import AttemptState, JobStatus
from finetune_operator.core.actions import Create, DeleteJob, DeletePod, Emit
from finetune_operator.core.pending import CREATE_PATIENCE, PULL_PATIENCE
from finetune_operator.observation.pods import Claim, Observation, Refusal
from testing.builders.jobs import NOW, deleting, ended, job, pod, running, seen, step

NOTHING = Observation(fresh=True)


def said(outcome: str, **fields: Any) -> str:
    return json.dumps({"final": True, "outcome": outcome, **fields})


def begun(**fields: Any) -> FineTuneJob:
    """A job whose attempt 0 was decided."""
    return step(job(**fields), NOTHING)[0]


def trained(**fields: Any) -> FineTuneJob:
    """A job whose attempt 0 runs."""
    of = begun(**fields)
    return step(of, seen(of, running(of, 0), running(of, 1)))[0]


def condition(status: JobStatus, kind: str) -> str:
    return next((c.status for c in status.conditions if c.type == kind), "absent")


def test_the_attempt_is_written_before_anything_is_made() -> None:
    of, decision = step(job(), NOTHING)
    assert (of.status.attempt, decision.actions) == (0, ())


def test_children_are_made_only_after_a_fresh_list() -> None:
    of = begun()
    _, unsure = step(of, Observation(fresh=False))
    assert unsure.unsure
    _, sure = step(of, NOTHING)
    made = [action.name for action in sure.actions if isinstance(action, Create)]
    assert made == ["Service bert", "ConfigMap bert-0", "Pod bert-0-0", "Pod bert-0-1"]


def test_what_is_there_is_not_made_again() -> None:
    of = begun()
    _, decision = step(of, seen(of, pod(of, 0)))
    assert [a.name for a in decision.actions if isinstance(a, Create)] == ["ConfigMap bert-0", "Pod bert-0-1"]


def test_a_job_runs_when_all_its_nodes_run() -> None:
    of = begun()
    half, _ = step(of, seen(of, running(of, 0), pod(of, 1)))
    assert condition(half.status, "Running") == "False"
    whole, decision = step(half, seen(of, running(of, 0), running(of, 1)))
    assert condition(whole.status, "Running") == "True"
    assert condition(whole.status, "Reconciling") == "absent"
    assert [a.reason for a in decision.actions if isinstance(a, Emit)] == ["Running"]


def test_a_failed_node_stops_its_siblings_first_and_is_judged_after() -> None:
    of = trained()
    failed = ended(of, 1, message=said("failed", errorType="RankKilled", signal=9, rank=3))
    stopping, decision = step(of, seen(of, running(of, 0), failed))
    assert (stopping.status.attempts[-1].state, decision.actions) == (AttemptState.STOPPING, ())

    again, decision = step(stopping, seen(of, running(of, 0), failed))
    assert decision.actions == (DeletePod("bert-0-0", "pod-0-0", 10),)

    judged, decision = step(again, seen(of, failed, gone=(deleting(running(of, 0)),)))
    old, new = judged.status.attempts
    assert (old.reason, old.rank, old.node_rank, new.attempt, new.not_before) == ("RankKilled", 3, 1, 1, None)
    assert [a.reason for a in decision.actions if isinstance(a, Emit)] == ["RankKilled"]


def test_no_pod_of_a_new_attempt_while_one_of_an_older_may_run() -> None:
    of = trained()
    record = of.status.attempts[-1].model_copy(update={"attempt": 1, "state": AttemptState.STARTING, "created": False})
    of = of.model_copy(update={"status": of.status.model_copy(update={"attempt": 1, "attempts": (record,)})})
    _, waits = step(of, seen(of, deleting(running(of, 0))))
    assert not any(isinstance(action, Create) for action in waits.actions)
    _, goes_on = step(of, seen(of, ended(of, 0)))
    assert any(isinstance(action, Create) for action in goes_on.actions)


def test_success_needs_the_result_of_every_node() -> None:
    of = trained()
    good, mute = said("succeeded"), ""
    done, _ = step(of, seen(of, *(ended(of, rank, exit_code=0, message=good) for rank in (0, 1))))
    assert (condition(done.status, "Complete"), condition(done.status, "Finished")) == ("True", "True")
    not_done, _ = step(of, seen(of, ended(of, 0, exit_code=0, message=good), ended(of, 1, exit_code=0, message=mute)))
    assert not_done.status.attempts[-1].state is AttemptState.STOPPING


def test_a_missing_pod_is_lost_only_if_a_fresh_list_says_so() -> None:
    of = trained()
    assert step(of, seen(of, running(of, 0), fresh=False))[1].unsure
    lost, decision = step(of, seen(of, running(of, 0)))
    assert not decision.unsure
    assert lost.status.attempts[-1].evidence[1].deleted


def test_a_pod_that_somebody_deletes_leaves_its_siblings_time_to_save() -> None:
    of = trained()
    stopping, _ = step(of, seen(of, deleting(running(of, 0)), running(of, 1)))
    _, decision = step(stopping, seen(of, deleting(running(of, 0)), running(of, 1)))
    assert decision.actions == (DeletePod("bert-0-1", "pod-0-1", 120),)


def test_suspended_is_true_only_when_no_pod_is_left() -> None:
    of = trained()
    asked = of.model_copy(update={"spec": of.spec.model_copy(update={"suspend": True})})
    stopping, _ = step(asked, seen(of, running(of, 0), running(of, 1)))
    still, decision = step(stopping, seen(of, running(of, 0), running(of, 1)))
    assert [a.grace_seconds for a in decision.actions if isinstance(a, DeletePod)] == [120, 120]
    assert condition(still.status, "Suspended") == "False"
    released, _ = step(still, seen(of))
    assert condition(released.status, "Suspended") == "True"
    assert released.status.restarts == 0


def test_resuming_begins_the_next_attempt_and_does_not_count_the_pause() -> None:
    of = trained()
    asked = of.model_copy(update={"spec": of.spec.model_copy(update={"suspend": True})})
    for observation in (seen(of, running(of, 0), running(of, 1)), seen(of)):
        asked, _ = step(asked, observation)
    back = asked.model_copy(update={"spec": of.spec})
    resumed, _ = step(back, seen(of), now=NOW + timedelta(seconds=90))
    assert (resumed.status.attempt, resumed.status.suspended_seconds, resumed.status.restarts) == (1, 90, 0)


def test_the_deadline_is_an_alarm_and_then_the_end() -> None:
    of = trained(activeDeadlineSeconds=60)
    pods = (running(of, 0), running(of, 1))
    assert step(of, seen(of, *pods))[1].requeue_after == timedelta(seconds=60)
    stopping, _ = step(of, seen(of, *pods), now=NOW + timedelta(seconds=60))
    failed, _ = step(stopping, seen(of), now=NOW + timedelta(seconds=61))
    assert (failed.status.attempts[-1].reason, failed.status.attempts[-1].fault) == ("DeadlineExceeded", "user")
    assert condition(failed.status, "Stalled") == "True"


def test_ttl_deletes_the_finished_job_and_nothing_earlier() -> None:
    of = trained(ttlSecondsAfterFinished=30)
    good = [ended(of, rank, exit_code=0, message=said("succeeded")) for rank in (0, 1)]
    done, _ = step(of, seen(of, *good))
    assert step(done, seen(of, *good), now=NOW + timedelta(seconds=29))[1].actions == ()
    assert step(done, seen(of, *good), now=NOW + timedelta(seconds=30))[1].actions == (DeleteJob(of.metadata.uid),)


def test_a_job_that_stopped_early_is_complete_and_says_why_and_whose_weights_it_holds() -> None:
    of = trained()
    words = (
        "stopped early at step 40 of 300: 3 evaluations without a better eval_loss; the weights are those of step 25"
    )
    progress = {"step": 40, "totalSteps": 300, "stoppedEarly": True, "ended": words}
    last = (said("succeeded", progress=progress), said("succeeded"))

    done, decision = step(of, seen(of, *(ended(of, rank, exit_code=0, message=last[rank]) for rank in (0, 1))))

    complete = next(c for c in done.status.conditions if c.type == "Complete")
    assert (complete.status, complete.message) == ("True", f"the result is in models:default/bert/result; {words}")
    assert [action.message for action in decision.actions if isinstance(action, Emit)] == [complete.message]
    assert done.status.display is not None
    assert done.status.display.progress == "stopped early 40/300"


def test_a_terminal_job_stays_as_it_is_and_late_pods_are_removed() -> None:
    of = trained()
    done, _ = step(of, seen(of, *(ended(of, rank, exit_code=0, message=said("succeeded")) for rank in (0, 1))))
    after, decision = step(done, seen(of, running(of, 0)), now=NOW + timedelta(days=1))
    assert after.status == done.status
    assert decision.actions == (DeletePod("bert-0-0", "pod-0-0", 10),)


def test_a_job_that_is_being_deleted_is_left_alone() -> None:
    of, decision = step(job(deleted=True), NOTHING)
    assert (of.status, decision.actions) == (JobStatus(), ())


def test_a_claim_for_one_node_is_refused_for_several() -> None:
    of = begun()
    claims = (Claim("models", ("ReadWriteOnce",)),)
    failed, _ = step(of, Observation(fresh=True, claims=claims))
    assert "models is ReadWriteOnce, but 2 nodes mount it" in failed.status.attempts[-1].message
    alone = begun(numNodes=1)
    assert step(alone, Observation(fresh=True, claims=claims))[0].status.completion_time is None


def test_what_the_api_server_calls_invalid_fails_the_job_and_a_quota_is_waited_for() -> None:
    of = begun()
    invalid = Refusal("Pod", "bert-0-0", 422, "spec.containers[0].resources: Invalid value")
    assert step(of, Observation(fresh=True, refusals=(invalid,)))[0].status.attempts[-1].reason == "InvalidSpec"
    quota = Refusal("Pod", "bert-0-0", 403, "exceeded quota: gpus")
    waiting, decision = step(of, Observation(fresh=True, refusals=(quota,)))
    assert waiting.status.waiting is not None
    assert (waiting.status.waiting.reason, decision.requeue_after) == ("CreateRefused", timedelta(seconds=1))


def test_an_image_that_cannot_be_pulled_is_waited_for_ten_minutes() -> None:
    of = begun()
    state = {"waiting": {"reason": "ErrImagePull", "message": "not found"}}
    stuck = [pod(of, rank, containerStatuses=[{"name": "trainer", "state": state}]) for rank in (0, 1)]
    waiting, decision = step(of, seen(of, *stuck))
    assert waiting.status.waiting is not None
    assert waiting.status.waiting.reason == "ImagePullFailed"
    assert decision.requeue_after == PULL_PATIENCE
    stopping, _ = step(waiting, seen(of, *stuck), now=NOW + PULL_PATIENCE)
    failed, _ = step(stopping, seen(of), now=NOW + PULL_PATIENCE)
    assert failed.status.attempts[-1].reason == "ImagePullFailed"
    assert failed.status.restarts == 0


@pytest.mark.parametrize(
    ("message", "again", "reason"),
    [
        ("context deadline exceeded", True, "ContainerRuntimeError"),
        ("no command specified", False, "StartError"),
    ],
)
def test_a_container_that_cannot_be_made_is_tried_elsewhere_or_given_up_after_three_minutes(
    message: str, again: bool, reason: str
) -> None:
    of = begun()
    state = {"waiting": {"reason": "CreateContainerError", "message": message}}
    pods = (running(of, 0), pod(of, 1, containerStatuses=[{"name": "trainer", "state": state}]))
    waiting, decision = step(of, seen(of, *pods))
    assert waiting.status.waiting is not None
    assert waiting.status.waiting.reason == "CreateContainerError"
    assert waiting.status.waiting.message.startswith(f"bert-0-1 on gpu-1: {message}; its kubelet tries again")
    assert decision.requeue_after == CREATE_PATIENCE

    over, _ = step(waiting, seen(of, *pods), now=NOW + CREATE_PATIENCE)
    ended_attempt = over.status.attempts[0]
    assert (ended_attempt.reason, ended_attempt.node_rank, ended_attempt.k8s_node) == (reason, 1, "gpu-1")
    assert (over.status.completion_time is None) is again
    _, then = step(over, seen(over, *pods), now=NOW + CREATE_PATIENCE)
    assert [action.name for action in then.actions if isinstance(action, DeletePod)] == ["bert-0-0", "bert-0-1"]


def test_deciding_twice_gives_the_same() -> None:
    of = trained()
    observation = seen(of, running(of, 0), running(of, 1))
    once, first = step(of, observation)
    twice, second = step(once, observation)
    assert once.status == twice.status
    assert (first.actions, second.actions) == ((), ())


def test_a_loss_that_is_no_number_does_not_spoil_the_status() -> None:
    of = trained()
    words = '{"final": true, "outcome": "failed", "errorType": "NonFiniteLoss", "progress": {"step": 3, "loss": NaN}}'
    failed, _ = step(of, seen(of, ended(of, 0, message=words), running(of, 1)))
    assert failed.status.progress is not None
    assert (failed.status.progress.step, failed.status.progress.loss) == (3, None)
