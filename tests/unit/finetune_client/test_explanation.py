"""Tests of the explanation of a job's state."""

from datetime import timedelta
from typing import Any

import pytest

from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import (
    AttemptRecord,
    AttemptState,
    Condition,
    Evidence,
    Fault,
    JobStatus,
    Phase,
    Progress,
    WaitStatus,
)
from finetune_client.explanation import FAULT_SENTENCES, Explanation, explain
from finetune_client.job import Job
from finetune_supervisor.messages import Degradation
from testing.builders.jobs import NOW, job

LATER = NOW + timedelta(minutes=31)
LOST = AttemptRecord(
    attempt=0,
    state=AttemptState.FAILED,
    start_time=NOW,
    end_time=NOW + timedelta(minutes=10),
    first_step=0,
    last_step=40,
    reason="NodeLost",
    fault=Fault.INFRASTRUCTURE,
    action="Restart",
    node_rank=1,
    message="node 1 (gpu-7): its Kubernetes node was lost",
    evidence=(
        Evidence(node_rank=0, outcome="failed", victim=True, message="connection closed"),
        Evidence(node_rank=1, k8s_node="gpu-7", ended=True, reason="NodeLost", last_step=40),
    ),
)


def explain_status(status: JobStatus) -> Explanation:
    metadata = job().metadata.model_copy(update={"creation_timestamp": NOW})
    return explain(Job({}, metadata, status), now=LATER)


def failed(reason: str, **record_fields: Any) -> JobStatus:
    record = AttemptRecord(attempt=0, state=AttemptState.FAILED, start_time=NOW, reason=reason, **record_fields)
    condition = Condition(type="Failed", status="True", last_transition_time=NOW, reason=reason, message="the cause")
    return JobStatus(phase=Phase.FAILED, attempt=0, attempts=(record,), conditions=(condition,), completion_time=NOW)


def test_a_failed_job_is_explained_by_cause_fault_evidence_and_advice() -> None:
    evidence = Evidence(
        node_rank=1, rank=5, k8s_node="gpu-3", exit_code=1, outcome="failed", error_type="ValueError", message="bad row"
    )
    explanation = explain_status(
        failed("DatasetError", fault=Fault.USER, node_rank=1, message="row 3", evidence=(evidence,))
    )

    assert explanation == Explanation(
        headline="bert has failed: DatasetError: the cause",
        story=("attempt 0 (Failed, 31m): DatasetError: row 3",),
        fault=FAULT_SENTENCES[Fault.USER],
        evidence=("node 1 on gpu-3: rank 5, exit code 1; ValueError: bad row",),
        advice=(Reason.DATASET_ERROR.advice, "read the log: finetune logs bert --node 1 --tail 50"),
    )


def test_a_failed_job_with_a_checkpoint_can_be_continued() -> None:
    status = failed("HostOutOfMemory").model_copy(update={"progress": Progress(step=3, last_checkpoint="step-3")})

    assert "continue from the last checkpoint" in explain_status(status).advice[-1]


@pytest.mark.parametrize("reason", [reason for reason in Reason if reason.fault is not None], ids=str)
def test_every_failure_reason_has_a_fault_and_advice(reason: Reason) -> None:
    explanation = explain_status(failed(reason))

    assert explanation.fault
    assert explanation.advice[0] == reason.advice


def test_the_cancellation_of_a_job_is_not_its_fault() -> None:
    assert explain_status(failed("Cancelled", fault=Fault.USER)).fault == "nobody: the job was cancelled"


def test_a_reason_of_a_newer_release_is_explained_by_its_message() -> None:
    explanation = explain_status(failed("CosmicRay", fault=Fault.UNKNOWN))

    assert explanation.headline == "bert has failed: CosmicRay: the cause"
    assert explanation.fault == FAULT_SENTENCES[Fault.UNKNOWN]


def test_evidence_leaves_out_the_victims_of_another_node() -> None:
    running = AttemptRecord(attempt=1, state=AttemptState.RUNNING, start_time=NOW + timedelta(minutes=11))
    explanation = explain_status(JobStatus(phase=Phase.RUNNING, attempt=1, restarts=1, attempts=(LOST, running)))

    assert explanation == Explanation(
        headline="bert is running after 1 restart",
        story=(
            "attempt 0 (Failed, 10m, steps 0 to 40, action: Restart): NodeLost: " + LOST.message,
            "attempt 1 (Running, 20m)",
        ),
        fault=FAULT_SENTENCES[Fault.INFRASTRUCTURE],
        evidence=("node 1 on gpu-7: NodeLost, last step 40",),
        advice=(f"against NodeLost: {Reason.NODE_LOST.advice}",),
    )


def test_a_waiting_job_is_explained_by_its_waiting_reason() -> None:
    waiting = WaitStatus(reason="Unschedulable", message="0/3 nodes are available", since=NOW)
    explanation = explain_status(JobStatus(phase=Phase.STARTING, attempt=0, waiting=waiting))

    assert explanation.headline == "bert has been waiting for 31m: Unschedulable: 0/3 nodes are available"
    assert explanation.advice == (
        Reason.UNSCHEDULABLE.meaning,
        "compare the requests of the pods with the free capacity: finetune events bert",
    )


def test_a_degraded_job_lists_what_slows_it_down() -> None:
    status = JobStatus(phase=Phase.RUNNING, degraded=(Degradation("DataBound", "raise dataset.numWorkers"),))

    assert explain_status(status).advice == ("DataBound: raise dataset.numWorkers",)


@pytest.mark.parametrize(
    ("phase", "condition", "headline"),
    [
        (Phase.COMPLETE, "Complete", "bert is complete: done"),
        (Phase.SUSPENDED, "Suspended", "bert is suspended: done"),
        (Phase.QUEUED, "Reconciling", "bert is queued: done"),
    ],
)
def test_other_phases_are_described_by_their_condition(phase: Phase, condition: str, headline: str) -> None:
    conditions = (Condition(type=condition, status="True", last_transition_time=NOW, reason="Any", message="done"),)

    assert explain_status(JobStatus(phase=phase, conditions=conditions)).headline == headline


def test_a_job_that_no_operator_processes_is_reported_after_a_while() -> None:
    explanation = explain_status(JobStatus())

    assert explanation.headline == "bert was created 31m ago, and no operator has processed it"
    assert any("namespace default" in line for line in explanation.advice)
    new_job = Job({}, job().metadata.model_copy(update={"creation_timestamp": LATER}), JobStatus())
    assert "just now" in explain(new_job, now=LATER).headline
