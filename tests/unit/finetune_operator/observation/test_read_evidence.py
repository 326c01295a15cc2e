"""Tests of evidence parsed from a pod: the termination message takes precedence over Kubernetes fields."""

import json
from datetime import UTC, datetime

import pytest

from finetune_api.termination import Outcome
from finetune_api.v1alpha1.status import EVIDENCE_MESSAGE_BYTES, Evidence
from finetune_operator.observation.pods import NodeObservation, observe_pod
from finetune_supervisor.error_text import MAX_MESSAGE_CHARACTERS
from testing.builders.jobs import RawBody, finished_pod, job, pod

JOB = job()
TERMINATION = {
    "final": True,
    "outcome": "failed",
    "errorType": "KeyError",
    "message": "no rows",
    "rank": 3,
    "time": 1e9 + 0.25,
}


def observe_single_pod(body: RawBody) -> NodeObservation:
    node = observe_pod(body, is_tombstone=False)
    assert node is not None
    return node


def observe_evidence(body: RawBody) -> Evidence:
    return observe_single_pod(body).evidence


def build_condition(condition_type: str, status: str, **fields: str) -> RawBody:
    return {"type": condition_type, "status": status, **fields}


def test_termination_message_is_parsed_into_evidence() -> None:
    node_evidence = observe_evidence(finished_pod(JOB, 0, message=json.dumps({**TERMINATION, "progress": {"step": 7}})))
    assert (node_evidence.outcome, node_evidence.error_type, node_evidence.message, node_evidence.rank) == (
        "failed",
        "KeyError",
        "no rows",
        3,
    )
    assert (node_evidence.exit_code, node_evidence.last_step) == (1, 7)


def test_finish_time_of_the_supervisor_has_subsecond_precision() -> None:
    stamp = "2001-09-09T01:46:41Z"
    final, preliminary = TERMINATION, {**TERMINATION, "final": False}
    assert observe_evidence(finished_pod(JOB, 0, message=json.dumps(final), finishedAt=stamp)).finished_at == datetime(
        2001, 9, 9, 1, 46, 40, 250_000, UTC
    )
    # a preliminary message has no finish time
    assert observe_evidence(
        finished_pod(JOB, 0, message=json.dumps(preliminary), finishedAt=stamp)
    ).finished_at == datetime(2001, 9, 9, 1, 46, 41, tzinfo=UTC)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("Traceback: no such file", id="log"),
        pytest.param('{"loss": 1.5', id="log that begins like JSON"),
        pytest.param('{"outcome": "exploded"}', id="foreign JSON"),
    ],
)
def test_unparsable_termination_messages_are_treated_as_log_output(text: str) -> None:
    node = observe_single_pod(finished_pod(JOB, 0, message=f"  {text}\n"))
    assert node.termination is None
    assert (node.evidence.outcome, node.evidence.message) == ("", text)


@pytest.mark.parametrize("filler", ["x", "错"])
def test_truncation_keeps_the_end_of_a_log_and_the_displayed_line_of_a_termination_message(filler: str) -> None:
    long = "begin " + filler * MAX_MESSAGE_CHARACTERS + "\nKeyError: the end\n   ^^^^"
    log, ended_with_message = (
        finished_pod(JOB, 0, message=long),
        finished_pod(JOB, 0, message=json.dumps({**TERMINATION, "message": long})),
    )
    assert long.endswith(observe_evidence(log).message)
    message = observe_evidence(ended_with_message).message
    assert message.startswith("begin ")
    assert message.endswith("\nKeyError: the end")
    assert len(message) <= MAX_MESSAGE_CHARACTERS
    assert len(json.dumps(message, ensure_ascii=False).encode()) <= EVIDENCE_MESSAGE_BYTES + 2


def test_pod_reason_takes_precedence_over_container_reason() -> None:
    body = finished_pod(JOB, 0, exit_code=137, message="killed")
    evicted_pod = {**body, "status": {**body["status"], "reason": "Evicted", "message": "node was low on memory"}}
    assert (observe_evidence(evicted_pod).reason, observe_evidence(evicted_pod).message) == (
        "Evicted",
        "node was low on memory",
    )
    assert (observe_evidence(body).reason, observe_evidence(body).message) == ("Error", "killed")


def test_disruption_condition_is_used_only_if_true() -> None:
    target = build_condition("DisruptionTarget", "True", reason="PreemptionByScheduler", message="made room")
    inactive = build_condition("DisruptionTarget", "False", reason="PreemptionByScheduler")
    node_evidence = observe_evidence(pod(JOB, 0, conditions=[build_condition("Ready", "False"), target]))
    assert (node_evidence.disruption, node_evidence.message) == ("PreemptionByScheduler", "made room")
    assert observe_evidence(pod(JOB, 0, conditions=[inactive])).disruption == ""


def test_signal_is_recorded_if_the_container_has_no_message() -> None:
    node_evidence = observe_evidence(finished_pod(JOB, 0, exit_code=137, signal=9))
    assert (node_evidence.signal, node_evidence.exit_code) == (9, 137)


@pytest.mark.parametrize(
    ("exit_code", "outcome", "has_succeeded"),
    [
        pytest.param(0, Outcome.SUCCEEDED, True, id="published result"),
        pytest.param(0, Outcome.STOPPED, False, id="stopped"),
        pytest.param(0, Outcome.RUNNING, False, id="ended while running"),
        pytest.param(1, Outcome.SUCCEEDED, False, id="exit code 1 after success"),
    ],
)
def test_exit_code_0_without_a_published_result_is_not_a_success(
    exit_code: int, outcome: Outcome, has_succeeded: bool
) -> None:
    message = json.dumps({"final": True, "outcome": outcome})
    assert observe_single_pod(finished_pod(JOB, 0, exit_code=exit_code, message=message)).has_succeeded is has_succeeded


KUEUE_MESSAGE = (
    "Preempted to accommodate a workload (UID: 527a9fa8-fb86-4116-b295-4f4dd72e478f,"
    " JobUID: 1f1c675a-711f-4a13-a3bd-da3d50e6f893) due to prioritization in the ClusterQueue; preemptor path: /team-b;"
    " preemptee path: /team-a"
)


@pytest.mark.parametrize(
    ("message", "preemptor"),
    [
        pytest.param(
            KUEUE_MESSAGE,
            "workload 527a9fa8-fb86-4116-b295-4f4dd72e478f of job 1f1c675a-711f-4a13-a3bd-da3d50e6f893",
            id="workload and job",
        ),
        pytest.param(
            "Preempted to accommodate a workload (UID: 527a9fa8-fb86-4116-b295-4f4dd72e478f, JobUID: UNKNOWN) due to x",
            "workload 527a9fa8-fb86-4116-b295-4f4dd72e478f",
            id="unknown job",
        ),
        pytest.param(
            "Preempted to accommodate a workload (UID: 527a9fa8-fb86-4116-b295-4f4dd72e478f) in the ClusterQueue",
            "workload 527a9fa8-fb86-4116-b295-4f4dd72e478f",
            id="older release",
        ),
        pytest.param(
            "Preempted to accommodate a workload (UID: UNKNOWN, JobUID: UNKNOWN) due to x", "", id="unknown workload"
        ),
        pytest.param("Preempted to accommodate a higher priority Workload", "", id="no workload"),
    ],
)
def test_preemptor_is_read_from_the_condition_of_kueue(message: str, preemptor: str) -> None:
    target = build_condition("TerminationTarget", "True", reason="WorkloadEvictedDueToPreempted", message=message)
    node_evidence = observe_evidence(pod(JOB, 0, conditions=[target]))

    assert (node_evidence.disruption, node_evidence.preemptor) == ("WorkloadEvictedDueToPreempted", preemptor)


def test_a_scheduler_names_no_preemptor() -> None:
    message = "default-scheduler: preempting to accommodate a higher priority pod"
    target = build_condition("DisruptionTarget", "True", reason="PreemptionByScheduler", message=message)
    assert observe_evidence(pod(JOB, 0, conditions=[target])).preemptor == ""


def test_a_disruption_by_kubernetes_takes_precedence_over_an_eviction_by_kueue() -> None:
    """The loss of a Kubernetes node determines when its pods are fenced."""
    evicted = build_condition("TerminationTarget", "True", reason="WorkloadEvictedDueToPreempted")
    lost = build_condition("DisruptionTarget", "True", reason="DeletionByTaintManager")
    inactive = build_condition("TerminationTarget", "False", reason="WorkloadDeleted")

    assert observe_evidence(pod(JOB, 0, conditions=[evicted, lost])).disruption == "DeletionByTaintManager"
    assert observe_evidence(pod(JOB, 0, conditions=[inactive])).disruption == ""
