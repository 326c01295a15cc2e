"""Tests of the text descriptions of jobs."""

from datetime import timedelta
from typing import Any

from finetune_api.v1alpha1.status import (
    AttemptRecord,
    AttemptState,
    BatchStatus,
    Condition,
    Display,
    Fault,
    JobStatus,
    NodeStatus,
    Phase,
    Progress,
    WaitStatus,
)
from finetune_cli.describe_job import format_job, format_job_table
from finetune_cli.progress_display import format_progress_line
from finetune_client.job import Job
from finetune_supervisor.messages import Degradation, NetworkBandwidth, NodePairBandwidth
from testing.builders.jobs import NOW, job

LATER = NOW + timedelta(minutes=31)
RUNNING_STATUS = JobStatus(
    phase=Phase.RUNNING,
    attempt=1,
    restarts=1,
    attempts=(
        AttemptRecord(
            attempt=0,
            state=AttemptState.FAILED,
            start_time=NOW,
            end_time=NOW + timedelta(minutes=10),
            first_step=0,
            last_step=40,
            downtime_seconds=95,
            steps_lost=10,
            reason="NodeLost",
            fault=Fault.INFRASTRUCTURE,
            message="node 1 (gpu-7): its Kubernetes node was lost",
        ),
        AttemptRecord(attempt=1, state=AttemptState.RUNNING, start_time=NOW + timedelta(minutes=10), last_step=120),
    ),
    conditions=(Condition(type="Running", status="True", last_transition_time=NOW, reason="Running"),),
    progress=Progress(step=120, total_steps=300, loss=1.3124, learning_rate=1e-4, last_checkpoint="step-00000100"),
    batch=BatchStatus(per_device_train_batch_size=1, gradient_accumulation_steps=16, world_size=4, effective=64),
    nodes=(NodeStatus(node_rank=0, pod_name="bert-1-0", k8s_node="gpu-3", phase="Running"),),
    output="models:default/bert",
    display=Display(nodes="2/2", progress="40% 120/300", loss="1.312", tokens_per_second="18.4k", eta="22m"),
)


def build_job_with_status(status: JobStatus) -> Job:
    metadata = job().metadata.model_copy(update={"creation_timestamp": NOW})
    return Job(body={}, metadata=metadata, status=status)


def describe_running_job(**fields: Any) -> str:
    return format_job(build_job_with_status(RUNNING_STATUS.model_copy(update=fields)), now=LATER)


def test_description_contains_the_best_evaluation() -> None:
    description = describe_running_job(
        progress=Progress(step=120, total_steps=300, eval_loss=1.5, best_step=100, best_metric=1.25)
    )

    assert "eval loss 1.5, best 1.25 at step 100" in description


def test_description_of_a_running_job_contains_all_sections() -> None:
    assert describe_running_job().splitlines() == [
        "Job       default/bert, 31m old",
        "Phase     Running",
        "Progress  40% 120/300, loss 1.312, learning rate 0.0001, 18.4k tokens/s, ETA 22m, "
        "last checkpoint step-00000100",
        "Batch     1 x 16 x 4 = 64 (per device x accumulation x ranks)",
        "Restarts  1",
        "Output    models:default/bert",
        "",
        "Attempts",
        "  0  Failed  10m  steps 0 to 40  NodeLost  fault: infrastructure",
        "     node 1 (gpu-7): its Kubernetes node was lost",
        "     trained again after 95s, 10 steps repeated",
        "  1  Running  21m  steps 0 to 120",
        "",
        "Nodes",
        "  0  Running      bert-1-0  gpu-3",
        "",
        "Conditions",
        "  Running      True     31m  Running",
    ]


def test_phase_includes_the_message_of_its_condition() -> None:
    failed = Condition(
        type="Failed", status="True", last_transition_time=NOW, reason="DatasetError", message="line 3: no messages"
    )

    assert "Phase     Failed: line 3: no messages" in describe_running_job(phase=Phase.FAILED, conditions=(failed,))


def test_pending_reason_is_shown_with_its_duration() -> None:
    waiting = WaitStatus(reason="Unschedulable", message="2 of 2 pods cannot be placed: no GPU", since=NOW)

    assert "Waiting   31m for Unschedulable: 2 of 2 pods cannot be placed: no GPU" in describe_running_job(
        waiting=waiting
    )


def test_description_contains_network_and_degradations() -> None:
    network = NetworkBandwidth(9.5, 180.0, (NodePairBandwidth("0-1", 8.7),))
    degraded = (Degradation("IdleGpus", "node 0 has 4 GPUs, of which 2 are idle"),)

    lines = describe_running_job(progress=Progress(step=120, network=network), degraded=degraded).splitlines()

    assert "Network   all-reduce 9.5 Gbit/s, within a node 180, slowest pair of nodes 0-1 8.7" in lines
    assert lines[lines.index("Degraded") + 1] == "  IdleGpus: node 0 has 4 GPUs, of which 2 are idle"


def test_job_without_status_is_described_as_not_processed() -> None:
    assert "not processed by the operator yet" in format_job(build_job_with_status(JobStatus()), now=LATER)


def test_table_has_the_columns_of_kubectl_get() -> None:
    assert format_job_table([build_job_with_status(RUNNING_STATUS)], now=LATER).splitlines() == [
        "NAME   PHASE     NODES   PROGRESS      LOSS    TOKENS/S   ETA   RESTARTS   AGE",
        "bert   Running   2/2     40% 120/300   1.312   18.4k      22m   1          31m",
    ]


def test_progress_line_omits_unknown_values() -> None:
    assert (
        format_progress_line(RUNNING_STATUS)
        == "Running  nodes 2/2  40% 120/300  loss 1.312  18.4k tokens/s  ETA 22m  1 restart"
    )
    assert format_progress_line(JobStatus()) == "Queued"


def test_description_divides_the_gpu_time_by_phase_and_fault() -> None:
    gpu_time = {"gpus": 16, "allocated_time": NOW, "first_step_time": NOW + timedelta(minutes=3)}
    failed, running = RUNNING_STATUS.attempts
    restarted = {
        **gpu_time,
        "restart_fault": Fault.INFRASTRUCTURE,
        "allocated_time": NOW + timedelta(minutes=11),
        "first_step_time": LATER,
    }
    attempts = (failed.model_copy(update=gpu_time), running.model_copy(update=restarted))

    description = describe_running_job(attempts=attempts)

    assert (
        "8.0 GPU hours: 67% starting (infrastructure), 18% useful, 10% starting, 6% lost (infrastructure)"
        in description
    )
