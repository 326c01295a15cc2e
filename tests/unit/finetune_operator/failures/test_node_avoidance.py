"""Tests of node avoidance after failures, and of the resulting pod affinity."""

from datetime import timedelta
from typing import Any

import pytest

from finetune_api.termination import Outcome, Termination
from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, JobStatus
from finetune_operator.core.actions import EmitEvent
from finetune_operator.failures.node_avoidance import MAX_KEPT_ATTEMPTS, find_nodes_to_avoid, prune_attempts
from finetune_operator.plan.manifests import build_children
from finetune_operator.plan.run_plan import plan_run
from finetune_operator.settings import Settings
from finetune_supervisor.failures.termination_message import encode_termination
from testing.builders.jobs import NOW, SETTINGS, decide_with, finished_pod, job, running_pod

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def failed_attempt(reason: str, node: str = "gpu-7", *, hours_ago: float = 0) -> AttemptRecord:
    ended_at = NOW - timedelta(hours=hours_ago)
    return AttemptRecord(attempt=0, state=AttemptState.FAILED, reason=reason, k8s_node=node, end_time=ended_at)


@pytest.mark.parametrize(
    ("attempts", "avoided_nodes"),
    [
        ((), ()),
        ((failed_attempt("GpuHardware"),), ("gpu-7",)),
        ((failed_attempt("DriverMismatch"), failed_attempt("GpuUnavailable", "gpu-1")), ("gpu-1", "gpu-7")),
        ((failed_attempt("Hang"),), ()),
        ((failed_attempt("Hang"), failed_attempt("CudaFault")), ("gpu-7",)),
        ((failed_attempt("Hang"), failed_attempt("Hang", "gpu-8")), ()),
        ((failed_attempt("Hang", hours_ago=25), failed_attempt("Hang")), ()),
        ((failed_attempt("GpuHardware", hours_ago=25),), ()),
        ((failed_attempt("PodDeleted"), failed_attempt("PodDeleted")), ()),
        ((failed_attempt("UserCodeError"), failed_attempt("RankKilled"), failed_attempt("Preempted")), ()),
        ((failed_attempt("NodeLost", ""), failed_attempt("NodeLost", "")), ()),
    ],
)
def test_avoided_nodes_depend_on_reason_and_number_of_failures(
    attempts: tuple[AttemptRecord, ...], avoided_nodes: tuple[str, ...]
) -> None:
    assert find_nodes_to_avoid(attempts, NOW) == avoided_nodes


def append_and_prune_attempts(
    *initial_attempts: AttemptRecord, new_attempt_count: int, reason: str = "GangIncomplete"
) -> tuple[AttemptRecord, ...]:
    """Append attempts with this reason, prune the list after each one, and return the remaining attempts."""
    remaining: tuple[AttemptRecord, ...] = ()
    for number, record in enumerate(
        (*initial_attempts, *(failed_attempt(reason, "") for _ in range(new_attempt_count)))
    ):
        remaining = prune_attempts((*remaining, record.model_copy(update={"attempt": number})), NOW)
    return remaining


def test_attempts_that_cause_node_avoidance_are_kept_longer_than_newer_attempts() -> None:
    remaining = append_and_prune_attempts(
        failed_attempt("UserCodeError"),
        failed_attempt("Hang"),
        failed_attempt("Hang"),
        failed_attempt("GpuHardware", "gpu-1"),
        new_attempt_count=50,
    )

    assert find_nodes_to_avoid(remaining, NOW) == ("gpu-1", "gpu-7")
    assert [record.attempt for record in remaining] == [1, 2, 3, *range(54 - MAX_KEPT_ATTEMPTS + 3, 54)]


@pytest.mark.parametrize(
    "initial_attempts",
    [
        pytest.param((failed_attempt("Hang"), failed_attempt("Hang", "gpu-8")), id="one strike per Kubernetes node"),
        pytest.param((failed_attempt("GpuHardware", hours_ago=25),), id="older than a day"),
    ],
)
def test_attempts_that_cause_no_node_avoidance_are_dropped(initial_attempts: tuple[AttemptRecord, ...]) -> None:
    assert [record.reason for record in append_and_prune_attempts(*initial_attempts, new_attempt_count=30)] == [
        "GangIncomplete"
    ] * MAX_KEPT_ATTEMPTS


def test_oldest_attempt_is_dropped_if_all_attempts_cause_node_avoidance() -> None:
    attempts = tuple(failed_attempt("GpuHardware", f"gpu-{number}") for number in range(30))

    remaining = append_and_prune_attempts(*attempts, new_attempt_count=0)
    assert len(remaining) == MAX_KEPT_ATTEMPTS
    assert remaining[-1].attempt == 29
    assert remaining[-2].attempt == 28


def run_job_with_broken_gpu(**fields: Any) -> tuple[JobStatus, str, dict[str, Any]]:
    """Return status, event and a pod of the next attempt after a GPU of node 1 failed."""
    message = Termination(
        final=True,
        outcome=Outcome.FAILED,
        time=NOW.timestamp(),
        rank=2,
        error_type="AcceleratorError",
        message="CUDA error: uncorrectable ECC error encountered",
    )
    settings = fields.pop("settings", SETTINGS)
    ftjob = job(**fields)
    ftjob, _ = decide_with(ftjob)
    ftjob, _ = decide_with(ftjob, running_pod(ftjob, 0), running_pod(ftjob, 1))
    failed_pod = finished_pod(ftjob, 1, exit_code=1, message=encode_termination(message).decode())
    ftjob, _ = decide_with(ftjob, running_pod(ftjob, 0), failed_pod)
    ftjob, decision = decide_with(ftjob, finished_pod(ftjob, 0, exit_code=143), failed_pod, settings=settings)
    (event,) = (action.message for action in decision.actions if isinstance(action, EmitEvent))
    *_, pod = build_children(plan_run(ftjob, attempt=1, settings=settings))
    return ftjob.status, event, pod


def test_next_attempt_avoids_the_failed_kubernetes_node_and_reports_it() -> None:
    status, event, pod = run_job_with_broken_gpu()

    first, second = status.attempts
    assert (first.reason, first.k8s_node, second.avoids) == ("GpuHardware", "gpu-1", ("gpu-1",))
    assert event.endswith("attempt 1 starts, avoiding gpu-1")
    terms = pod["spec"]["affinity"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    assert terms[0]["matchFields"][0]["values"] == ["gpu-1"]


@pytest.mark.parametrize(
    "fields",
    [
        {"restartPolicy": {"avoidFailingNodes": False}},
        {"settings": Settings(trainer_image="local", on_cluster=False)},
    ],
    ids=["disabled in the spec", "local mode"],
)
def test_no_kubernetes_node_is_avoided_if_disabled_or_local(fields: dict[str, Any]) -> None:
    status, event, pod = run_job_with_broken_gpu(**fields)

    assert status.attempts[-1].avoids == ()
    assert event.endswith("attempt 1 starts")
    assert "affinity" not in pod["spec"]
