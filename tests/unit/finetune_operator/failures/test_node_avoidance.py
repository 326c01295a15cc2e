"""Kubernetes nodes that a job avoids, and the affinity of its pods."""

from datetime import timedelta
from typing import Any

import pytest

from finetune_api.termination import Outcome, Termination
from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, JobStatus
from finetune_operator.core.actions import Emit
from finetune_operator.failures.node_avoidance import MAX_KEPT_ATTEMPTS, nodes_to_avoid, prune_attempts
from finetune_operator.plan.manifests import build_children
from finetune_operator.plan.run_plan import plan_run
from finetune_operator.settings import Settings
from finetune_supervisor.failures.termination_message import encode_termination
from testing.builders.jobs import NOW, SETTINGS, decide_once, ended_pod, job, observation_of, running_pod

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def failed(reason: str, node: str = "gpu-7", *, hours_ago: float = 0) -> AttemptRecord:
    ended_at = NOW - timedelta(hours=hours_ago)
    return AttemptRecord(attempt=0, state=AttemptState.FAILED, reason=reason, k8s_node=node, end_time=ended_at)


@pytest.mark.parametrize(
    ("attempts", "avoided"),
    [
        ((), ()),
        ((failed("GpuHardware"),), ("gpu-7",)),
        ((failed("DriverMismatch"), failed("GpuUnavailable", "gpu-1")), ("gpu-1", "gpu-7")),
        ((failed("Hang"),), ()),
        ((failed("Hang"), failed("CudaFault")), ("gpu-7",)),
        ((failed("Hang"), failed("Hang", "gpu-8")), ()),
        ((failed("Hang", hours_ago=25), failed("Hang")), ()),
        ((failed("GpuHardware", hours_ago=25),), ()),
        ((failed("PodDeleted"), failed("PodDeleted")), ()),
        ((failed("UserCodeError"), failed("RankKilled"), failed("Preempted")), ()),
        ((failed("NodeLost", ""), failed("NodeLost", "")), ()),
    ],
)
def test_kubernetes_nodes_are_avoided_by_reason_and_number_of_failures(
    attempts: tuple[AttemptRecord, ...], avoided: tuple[str, ...]
) -> None:
    assert nodes_to_avoid(attempts, NOW) == avoided


def prune_after_each(
    *first: AttemptRecord, repetitions: int, reason: str = "GangIncomplete"
) -> tuple[AttemptRecord, ...]:
    """Return the attempts that remain of these and `repetitions` more with `reason`, pruned after each."""
    remaining: tuple[AttemptRecord, ...] = ()
    for number, record in enumerate((*first, *(failed(reason, "") for _ in range(repetitions)))):
        remaining = prune_attempts((*remaining, record.model_copy(update={"attempt": number})), NOW)
    return remaining


def test_the_latest_attempts_are_kept() -> None:
    remaining = prune_after_each(repetitions=50)

    assert [record.attempt for record in remaining] == list(range(50 - MAX_KEPT_ATTEMPTS, 50))


def test_attempts_that_cause_avoidance_are_kept_before_newer_ones() -> None:
    remaining = prune_after_each(
        failed("UserCodeError"), failed("Hang"), failed("Hang"), failed("GpuHardware", "gpu-1"), repetitions=50
    )

    assert nodes_to_avoid(remaining, NOW) == ("gpu-1", "gpu-7")
    assert [record.attempt for record in remaining] == [1, 2, 3, *range(54 - MAX_KEPT_ATTEMPTS + 3, 54)]


@pytest.mark.parametrize(
    "first",
    [
        pytest.param((failed("Hang"), failed("Hang", "gpu-8")), id="one strike per Kubernetes node"),
        pytest.param((failed("GpuHardware", hours_ago=25),), id="older than a day"),
    ],
)
def test_attempts_that_cause_no_avoidance_are_dropped(first: tuple[AttemptRecord, ...]) -> None:
    assert [record.reason for record in prune_after_each(*first, repetitions=30)] == [
        "GangIncomplete"
    ] * MAX_KEPT_ATTEMPTS


def test_if_every_attempt_causes_avoidance_the_oldest_is_dropped() -> None:
    job_with_broken_gpu = tuple(failed("GpuHardware", f"gpu-{number}") for number in range(30))

    remaining = prune_after_each(*job_with_broken_gpu, repetitions=0)
    assert len(remaining) == MAX_KEPT_ATTEMPTS
    assert remaining[-1].attempt == 29
    assert remaining[-2].attempt == 28


def job_with_broken_gpu(**fields: Any) -> tuple[JobStatus, str, dict[str, Any]]:
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
    ftjob, _ = decide_once(ftjob, observation_of(ftjob))
    ftjob, _ = decide_once(ftjob, observation_of(ftjob, running_pod(ftjob, 0), running_pod(ftjob, 1)))
    failed_pod = ended_pod(ftjob, 1, exit_code=1, message=encode_termination(message).decode())
    ftjob, _ = decide_once(ftjob, observation_of(ftjob, running_pod(ftjob, 0), failed_pod))
    ftjob, decision = decide_once(
        ftjob, observation_of(ftjob, ended_pod(ftjob, 0, exit_code=143), failed_pod), settings=settings
    )
    (event,) = (action.message for action in decision.actions if isinstance(action, Emit))
    *_, pod = build_children(plan_run(ftjob, attempt=1, settings=settings))
    return ftjob.status, event, pod


def test_the_next_attempt_avoids_the_failed_kubernetes_node_and_reports_it() -> None:
    status, event, pod = job_with_broken_gpu()

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
def test_no_kubernetes_node_is_avoided_if_disabled_or_in_local_mode(fields: dict[str, Any]) -> None:
    status, event, pod = job_with_broken_gpu(**fields)

    assert status.attempts[-1].avoids == ()
    assert event.endswith("attempt 1 starts")
    assert "affinity" not in pod["spec"]
