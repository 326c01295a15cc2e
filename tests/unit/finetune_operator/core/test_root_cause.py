"""Tests that the root cause of a stopped attempt does not depend on the order of observations."""

from datetime import timedelta
from typing import Any

import pytest

from finetune_api.termination import Outcome
from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.status import AttemptState, Fault
from finetune_operator import names
from finetune_operator.core.actions import DeletePod
from finetune_operator.core.job_context import ABORT_GRACE_SECONDS
from finetune_operator.core.stop_attempt import ROOT_CAUSE_GRACE
from testing.builders.jobs import NOW, RawBody, decide_with, finished_pod, job, pod, running_pod, terminating_pod
from testing.builders.stopping import (
    VICTIM,
    build_pod_deleted_before_its_start,
    build_pod_evicted_by_kueue,
    build_running_job,
    termination_message,
)

LATER = NOW + timedelta(seconds=2)


def pod_restarted_in_place(ftjob: FineTuneJob, node_rank: int, **terminated_fields: Any) -> RawBody:
    """Return a pod whose container was restarted in place by the kubelet."""
    [status] = finished_pod(ftjob, node_rank, **terminated_fields)["status"]["containerStatuses"]
    body = running_pod(ftjob, node_rank)
    body["status"]["containerStatuses"][0] |= {"restartCount": 1, "lastState": status["state"]}
    return body


def test_pod_without_labels_is_also_deleted_before_the_verdict() -> None:
    ftjob = build_running_job()
    unlabelled_pod = running_pod(ftjob, 1)
    del unlabelled_pod["metadata"]["labels"][names.JOB_UID]
    unconfirmed = decide_with(ftjob, running_pod(ftjob, 0), is_fresh=False, now=LATER)[1]
    ftjob, _ = decide_with(ftjob, running_pod(ftjob, 0), unlabelled_pod, now=LATER)
    stopping = decide_with(ftjob, running_pod(ftjob, 0), unlabelled_pod, now=LATER)[1]
    ftjob, waiting = decide_with(
        ftjob, terminating_pod(unlabelled_pod), tombstones=(terminating_pod(running_pod(ftjob, 0)),), now=LATER
    )
    state_with_pod = ftjob.status.attempts[-1].state
    ftjob, _ = decide_with(ftjob, now=LATER)

    assert unconfirmed.needs_confirmation
    assert [action.name for action in stopping.actions if isinstance(action, DeletePod)] == ["bert-0-0", "bert-0-1"]
    assert (state_with_pod, waiting.requeue_after is not None) == (AttemptState.STOPPING, True)
    assert (ftjob.status.attempts[0].reason, ftjob.status.attempts[0].node_rank) == ("PodDeleted", 1)
    assert "pod bert-0-1 lost its labels" in ftjob.status.attempts[0].message


STOPPED: RawBody = {"message": termination_message(outcome=Outcome.STOPPED), "finishedAt": "2026-01-01T12:00:00Z"}


@pytest.mark.parametrize("is_observed_late", [False, True], ids=["observed first", "observed after its victim"])
def test_pod_with_a_container_restarted_in_place_is_the_root_cause_and_is_deleted(is_observed_late: bool) -> None:
    ftjob = build_running_job()
    restarted_pod = pod_restarted_in_place(ftjob, 1, exit_code=143, **STOPPED)
    other = finished_pod(ftjob, 0, **VICTIM)
    observations = [(other, running_pod(ftjob, 1))] if is_observed_late else [(running_pod(ftjob, 0), restarted_pod)]
    for pods in (*observations, (other, restarted_pod)):
        ftjob, decision = decide_with(ftjob, *pods, now=LATER)
    ftjob, decision = decide_with(ftjob, other, restarted_pod, now=NOW + timedelta(seconds=10))
    assert [action.name for action in decision.actions if isinstance(action, DeletePod)] == ["bert-0-1"]

    broken = finished_pod(ftjob, 1, exit_code=128, reason="StartError", message='exec: "python3": not found')
    ftjob, _ = decide_with(ftjob, other, broken, now=LATER)
    first = ftjob.status.attempts[0]
    assert (first.reason, first.node_rank, first.fault) == ("PodDeleted", 1, Fault.INFRASTRUCTURE)
    assert "pod bert-0-1 was restarted in place" in first.message


def test_pod_deleted_by_a_user_is_the_root_cause_even_if_its_ranks_report_lost_peers() -> None:
    ftjob = build_running_job()
    ftjob, _ = decide_with(ftjob, terminating_pod(running_pod(ftjob, 0)), running_pod(ftjob, 1))
    ftjob, _ = decide_with(
        ftjob,
        terminating_pod(finished_pod(ftjob, 0, **VICTIM)),
        terminating_pod(finished_pod(ftjob, 1, **VICTIM)),
        now=LATER,
    )

    assert (ftjob.status.attempts[0].reason, ftjob.status.attempts[0].node_rank) == ("PodDeleted", 0)


def test_pods_are_deleted_only_after_the_grace_period_of_the_root_cause() -> None:
    """After SIGTERM, a node reports that it was stopped, so deleting the root cause too early would hide its error."""
    ftjob = build_running_job()
    pods = (finished_pod(ftjob, 0, **VICTIM), running_pod(ftjob, 1))
    ftjob, _ = decide_with(ftjob, *pods)
    ftjob, during_grace = decide_with(ftjob, *pods, now=LATER)
    _, after_grace = decide_with(ftjob, *pods, now=LATER + ROOT_CAUSE_GRACE)
    ftjob, _ = decide_with(
        ftjob, pods[0], finished_pod(ftjob, 1, message=termination_message(error_type="ValueError")), now=LATER
    )

    assert during_grace.actions == ()
    # the grace period of the root cause starts when the victim terminates, at 0.4 s
    assert during_grace.requeue_after == timedelta(seconds=1.4)
    assert after_grace.actions == (DeletePod("bert-0-1", "pod-0-1", ABORT_GRACE_SECONDS),)
    assert (ftjob.status.attempts[0].reason, ftjob.status.attempts[0].node_rank) == ("UserCodeError", 1)


START_ERROR: RawBody = {
    "exitCode": 128,
    "reason": "StartError",
    "message": "failed to start containerd task: context canceled",
    "finishedAt": "2026-01-01T12:00:01Z",
}


@pytest.mark.parametrize("deleted_rank", [0, 1])
@pytest.mark.parametrize("is_deletion_observed", [True, False], ids=["deletion observed", "last state only"])
@pytest.mark.parametrize(
    "terminated_fields", [{}, START_ERROR], ids=["container never started", "start of the container cancelled"]
)
def test_a_pod_deleted_during_its_start_is_the_root_cause(
    deleted_rank: int, is_deletion_observed: bool, terminated_fields: RawBody
) -> None:
    """The kubelet reports an unknown status for a container that it had not started when the pod was deleted.

    The operator then deletes the other pod, which also has not started, so both pods end with the same status.
    """
    ftjob, _ = decide_with(job())
    pods = [pod(ftjob, rank) for rank in range(2)]
    ftjob, _ = decide_with(ftjob, *pods)
    ended = [build_pod_deleted_before_its_start(body, **terminated_fields) for body in pods]
    pods[deleted_rank] = terminating_pod(pods[deleted_rank]) if is_deletion_observed else ended[deleted_rank]
    for observed in (pods, ended, ended):
        ftjob, _ = decide_with(ftjob, *observed, now=LATER)

    first = ftjob.status.attempts[0]
    assert (first.reason, first.node_rank) == ("PodDeleted", deleted_rank)
    assert f"pod bert-0-{deleted_rank} was deleted" in first.message


def test_a_container_that_reacts_to_its_deletion_by_the_operator_is_not_the_root_cause() -> None:
    ftjob = build_running_job()
    ftjob, _ = decide_with(ftjob, finished_pod(ftjob, 0, **VICTIM), running_pod(ftjob, 1), now=LATER)
    reaction = terminating_pod(finished_pod(ftjob, 1, exit_code=0, finishedAt="2026-01-01T12:00:03Z"))
    reaction["metadata"] |= {"deletionGracePeriodSeconds": 27}  # the deletion was requested at 12:00:03
    ftjob, _ = decide_with(ftjob, finished_pod(ftjob, 0, **VICTIM), reaction, now=LATER)

    assert ftjob.status.attempts[0].reason == "PeerLost"


def test_every_preemption_by_kueue_restarts_the_job_without_using_its_budget() -> None:
    ftjob = build_running_job(restartPolicy={"maxRestarts": 0, "maxInfrastructureRestarts": 0})
    for attempt in range(20):
        pods = [running_pod(ftjob, rank, attempt=attempt) for rank in range(2)]
        ftjob, _ = decide_with(ftjob, *pods)
        evicted = [build_pod_evicted_by_kueue(body, preemptor="527a9fa8-fb86-4116-b295-4f4dd72e478f") for body in pods]
        ftjob, _ = decide_with(ftjob, *evicted)
        ftjob, _ = decide_with(ftjob, tombstones=tuple(evicted))

    last = ftjob.status.attempts[-2]
    assert (last.attempt, last.reason, last.fault, ftjob.status.restarts) == (19, "Preempted", Fault.PREEMPTION, 20)
    assert "in favour of workload 527a9fa8-fb86-4116-b295-4f4dd72e478f" in last.message
    assert ftjob.status.without_progress.infrastructure == 0


def test_an_eviction_by_kueue_without_a_named_preemptor_uses_the_budget() -> None:
    ftjob = build_running_job(restartPolicy={"maxInfrastructureRestarts": 0})
    evicted = [build_pod_evicted_by_kueue(running_pod(ftjob, rank)) for rank in range(2)]
    ftjob, _ = decide_with(ftjob, *evicted)
    ftjob, _ = decide_with(ftjob, tombstones=tuple(evicted))

    assert (ftjob.status.phase, ftjob.status.attempts[0].reason) == ("Failed", "Preempted")
    assert "maxInfrastructureRestarts" in ftjob.status.attempts[0].message
