"""Tests of stopping an attempt, from the first pod deletion to the verdict."""

from datetime import timedelta
from typing import Any

import pytest

from finetune_api.bounded_text import measure_json_bytes
from finetune_api.schema.status_schema import bound_status, bound_value
from finetune_api.termination import Outcome
from finetune_api.v1alpha1.job import GRACE_SECONDS
from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import EVIDENCE_MESSAGE_BYTES, AttemptState, Phase
from finetune_api.visible_text import escape_controls
from finetune_operator.core.actions import DeletePod
from finetune_operator.core.job_context import ABORT_GRACE_SECONDS
from testing.builders.jobs import (
    NOW,
    RawBody,
    command,
    decide_with,
    finished_pod,
    running_pod,
    terminating_pod,
)
from testing.builders.stopping import KILLED, VICTIM, build_disrupted_pod, build_running_job, termination_message

LATER = NOW + timedelta(seconds=2)


def test_attempt_succeeds_if_all_nodes_succeed_despite_a_stop_reason() -> None:
    success: RawBody = {"exit_code": 0, "message": termination_message(outcome=Outcome.SUCCEEDED)}
    ftjob = build_running_job()
    ftjob, _ = decide_with(ftjob, running_pod(ftjob, 0), terminating_pod(running_pod(ftjob, 1)))
    ftjob, _ = decide_with(
        ftjob, finished_pod(ftjob, 0, **success), terminating_pod(finished_pod(ftjob, 1, **success)), now=LATER
    )

    assert ftjob.status.attempts[0].state is AttemptState.SUCCEEDED
    assert ftjob.status.completion_time == LATER


def test_an_attempt_that_a_newer_release_stopped_is_judged_by_its_evidence() -> None:
    ftjob = build_running_job()
    ftjob, _ = decide_with(ftjob, running_pod(ftjob, 0), finished_pod(ftjob, 1, **KILLED))
    record = ftjob.status.attempts[-1].model_copy(update={"reason": "CosmicRays"})
    ftjob = ftjob.model_copy(update={"status": ftjob.status.model_copy(update={"attempts": (record,)})})

    ftjob, _ = decide_with(ftjob, finished_pod(ftjob, 1, **KILLED), now=LATER)

    assert [record.reason for record in ftjob.status.attempts] == ["ContainerKilled", ""]


@pytest.mark.parametrize(
    ("first_pod", "grace_seconds"),
    [
        pytest.param(lambda ftjob: terminating_pod(running_pod(ftjob, 1)), GRACE_SECONDS, id="drained node"),
        pytest.param(lambda ftjob: finished_pod(ftjob, 1, **KILLED), ABORT_GRACE_SECONDS, id="failed node"),
    ],
)
def test_the_grace_period_of_other_pods_depends_on_the_stop_reason(first_pod: Any, grace_seconds: int) -> None:
    ftjob = build_running_job()
    pods = (running_pod(ftjob, 0), first_pod(ftjob))
    ftjob, _ = decide_with(ftjob, *pods)
    _, decision = decide_with(ftjob, *pods)

    assert [a.grace_seconds for a in decision.actions if isinstance(a, DeletePod)] == [grace_seconds]


def test_the_grace_period_of_other_pods_is_that_of_the_spec() -> None:
    ftjob = build_running_job(terminationGracePeriodSeconds=3600)
    pods = (running_pod(ftjob, 0), terminating_pod(running_pod(ftjob, 1)))
    ftjob, _ = decide_with(ftjob, *pods)
    _, decision = decide_with(ftjob, *pods)

    assert [a.grace_seconds for a in decision.actions if isinstance(a, DeletePod)] == [3600]


def test_node_failure_during_a_drain_shortens_the_grace_period_of_other_pods() -> None:
    ftjob = build_running_job()
    pods = (
        terminating_pod(running_pod(ftjob, 0), deadline=NOW + timedelta(seconds=GRACE_SECONDS)),
        terminating_pod(running_pod(ftjob, 1)),
    )
    ftjob, _ = decide_with(ftjob, *pods)
    _, decision = decide_with(ftjob, pods[0], finished_pod(ftjob, 1, **VICTIM))

    assert decision.actions == (DeletePod("bert-0-0", "pod-0-0", ABORT_GRACE_SECONDS),)


def test_a_kubernetes_node_with_a_fast_clock_does_not_delay_the_stop() -> None:
    ahead = finished_pod(
        ftjob := build_running_job(),
        0,
        message=termination_message(error_type="DistBackendError", time=NOW.timestamp() + 3600),
    )
    ftjob, _ = decide_with(ftjob, ahead, running_pod(ftjob, 1))
    _, decision = decide_with(ftjob, ahead, running_pod(ftjob, 1))

    assert decision.actions == (DeletePod("bert-0-1", "pod-0-1", ABORT_GRACE_SECONDS),)


def test_only_pods_on_reachable_kubernetes_nodes_get_the_full_grace_period() -> None:
    """A lost Kubernetes node cannot stop its pod, so a long grace period would only delay fencing and the restart."""
    ftjob = build_running_job()
    lost_pod = build_disrupted_pod(
        terminating_pod(running_pod(ftjob, 1), deadline=NOW + timedelta(seconds=GRACE_SECONDS)),
        "DeletionByTaintManager",
    )
    ftjob, _ = decide_with(ftjob, running_pod(ftjob, 0), lost_pod)
    _, decision = decide_with(ftjob, running_pod(ftjob, 0), lost_pod)

    assert decision.actions == (
        DeletePod("bert-0-0", "pod-0-0", GRACE_SECONDS),
        DeletePod("bert-0-1", "pod-0-1", ABORT_GRACE_SECONDS),
    )


ECC_ERROR, LONG_CONTROLS = "uncorrectable ECC error", "\x9b" * 250  # the escapes exceed the limit of the status


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        pytest.param(termination_message(message=LONG_CONTROLS + ECC_ERROR), "\\x9b\\x9b", id="begin of a message"),
        pytest.param(LONG_CONTROLS + ECC_ERROR, ECC_ERROR, id="end of a log"),
        pytest.param(termination_message(message="uncorrectable\x1b[0mECC"), "\\x1b[0mECC", id="within a pattern"),
    ],
)
def test_the_verdict_depends_on_the_raw_message_and_the_status_contains_its_escapes(text: str, kept: str) -> None:
    ftjob = build_running_job()
    ended = finished_pod(ftjob, 0, message=text), finished_pod(ftjob, 1, **VICTIM)
    for now in (NOW, LATER):
        ftjob, _ = decide_with(ftjob, *ended, now=now)
        ftjob = ftjob.model_copy(update={"status": bound_status(ftjob.status)})

    record, status = ftjob.status.attempts[0], ftjob.status.model_dump(mode="json")
    assert record.reason == Reason.GPU_HARDWARE
    assert kept in record.evidence[0].message
    assert measure_json_bytes(record.evidence[0].message) <= EVIDENCE_MESSAGE_BYTES
    assert bound_value(status, {}) == status
    assert escape_controls(record.evidence[0].message) == record.evidence[0].message


def test_expired_deadline_does_not_requeue_a_stopping_job_immediately() -> None:
    ftjob = build_running_job(activeDeadlineSeconds=60)
    after_deadline = NOW + timedelta(seconds=61)
    ftjob, _ = decide_with(ftjob, running_pod(ftjob, 0), running_pod(ftjob, 1), now=after_deadline)
    _, decision = decide_with(ftjob, running_pod(ftjob, 0), running_pod(ftjob, 1), now=after_deadline)

    assert ftjob.status.attempts[-1].reason == "DeadlineExceeded"
    assert decision.requeue_after is not None
    assert decision.requeue_after > timedelta(seconds=1)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        pytest.param(None, "the command ended with exit 0 on every node", id="without an output"),
        pytest.param(
            {"persistentVolumeClaim": {"claimName": "models"}},
            "the command ended with exit 0 on every node; files written to FINETUNE_OUTPUT are in models:default/bert",
            id="with an output",
        ),
    ],
)
def test_job_with_a_command_is_complete_when_every_node_has_succeeded(output: Any, message: str) -> None:
    ftjob = build_running_job(**command({"script": "train.py"}, output=output))
    success: RawBody = {"exit_code": 0, "message": termination_message(outcome=Outcome.SUCCEEDED)}
    ftjob, _ = decide_with(ftjob, finished_pod(ftjob, 0, **success), finished_pod(ftjob, 1, **success))

    assert (ftjob.status.phase, ftjob.status.attempts[-1].message) == (Phase.COMPLETE, message)
    assert ftjob.status.batch is None
    assert ftjob.status.output == ("models:default/bert" if output else None)


@pytest.mark.parametrize(
    ("age_seconds", "grace_seconds"),
    [
        (0, ABORT_GRACE_SECONDS),
        (4, ABORT_GRACE_SECONDS),
        (5, GRACE_SECONDS),
        pytest.param(-3600, GRACE_SECONDS, id="the clock of the Kubernetes node is ahead"),
    ],
)
def test_a_container_that_has_just_started_gets_a_short_grace_period(age_seconds: int, grace_seconds: int) -> None:
    """It may not receive SIGTERM, and would train on until its grace period ends."""
    ftjob = build_running_job()
    ftjob = ftjob.model_copy(update={"spec": ftjob.spec.model_copy(update={"suspend": True})})
    pods = (running_pod(ftjob, 0), running_pod(ftjob, 1, started_at=NOW - timedelta(seconds=age_seconds)))
    ftjob, _ = decide_with(ftjob, *pods)
    _, decision = decide_with(ftjob, *pods)

    deletions = [action for action in decision.actions if isinstance(action, DeletePod)]
    assert {action.name: action.grace_seconds for action in deletions} == {
        "bert-0-0": GRACE_SECONDS,
        "bert-0-1": grace_seconds,
    }
