"""From which Kubernetes nodes a job keeps away, and how its pods say so."""

import json
from datetime import timedelta
from typing import Any

import pytest

from finetune_api.termination import Outcome, Termination
from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, JobStatus
from finetune_operator.core.actions import Emit
from finetune_operator.failures.node_avoidance import KEPT_ATTEMPTS, keep_away, nodes_to_avoid, remember
from finetune_operator.plan.manifests import build_children
from finetune_operator.plan.run_plan import Settings, plan_run
from testing.builders.jobs import NOW, SETTINGS, ended, job, running, seen, step

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
NOT_GPU_7 = {"key": "metadata.name", "operator": "NotIn", "values": ["gpu-7"]}


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
def test_who_failed_often_enough_is_avoided(attempts: tuple[AttemptRecord, ...], avoided: tuple[str, ...]) -> None:
    assert nodes_to_avoid(attempts, NOW) == avoided


def begin_often(*first: AttemptRecord, times: int, reason: str = "GangIncomplete") -> tuple[AttemptRecord, ...]:
    """Those attempts, and then so many more that end for this reason, remembered as they come."""
    kept: tuple[AttemptRecord, ...] = ()
    for number, record in enumerate((*first, *(failed(reason, "") for _ in range(times)))):
        kept = remember((*kept, record.model_copy(update={"attempt": number})), NOW)
    return kept


def test_the_last_attempts_are_remembered() -> None:
    kept = begin_often(times=50)

    assert [record.attempt for record in kept] == list(range(50 - KEPT_ATTEMPTS, 50))


def test_a_machine_is_not_forgiven_because_the_job_waited_often_for_room() -> None:
    kept = begin_often(
        failed("UserCodeError"), failed("Hang"), failed("Hang"), failed("GpuHardware", "gpu-1"), times=50
    )

    assert nodes_to_avoid(kept, NOW) == ("gpu-1", "gpu-7")
    assert [record.attempt for record in kept] == [1, 2, 3, *range(54 - KEPT_ATTEMPTS + 3, 54)]


@pytest.mark.parametrize(
    "first",
    [
        pytest.param((failed("Hang"), failed("Hang", "gpu-8")), id="one strike each, for which nothing is avoided"),
        pytest.param((failed("GpuHardware", hours_ago=25),), id="yesterday"),
    ],
)
def test_what_avoids_nothing_is_forgotten(first: tuple[AttemptRecord, ...]) -> None:
    assert [record.reason for record in begin_often(*first, times=30)] == ["GangIncomplete"] * KEPT_ATTEMPTS


def test_where_every_attempt_avoids_a_machine_the_oldest_is_forgotten() -> None:
    broken = tuple(failed("GpuHardware", f"gpu-{number}") for number in range(30))

    kept = begin_often(*broken, times=0)
    assert len(kept) == KEPT_ATTEMPTS
    assert kept[-1].attempt == 29
    assert kept[-2].attempt == 28


def test_a_pod_without_wishes_only_keeps_away() -> None:
    assert keep_away(None, ()) is None
    assert keep_away(None, ("gpu-7",)) == {
        "nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{"matchFields": [NOT_GPU_7]}]}}
    }


def test_every_alternative_of_the_user_keeps_away_and_stays() -> None:
    zone = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    named: dict[str, Any] = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["gpu-1"]}]}
    given = {"podAffinity": {"x": 1}, "nodeAffinity": {"preferred": [], REQUIRED: {"nodeSelectorTerms": [zone, named]}}}
    before = json.dumps(given)

    kept = keep_away(given, ("gpu-7", "gpu-8"))

    assert kept is not None
    assert kept["podAffinity"] == {"x": 1}
    assert kept["nodeAffinity"]["preferred"] == []
    first, second = kept["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    assert first["matchExpressions"] == zone["matchExpressions"]
    assert [field["values"] for field in first["matchFields"]] == [["gpu-7"], ["gpu-8"]]
    assert [field["values"] for field in second["matchFields"]] == [["gpu-1"], ["gpu-7"], ["gpu-8"]]
    assert json.dumps(given) == before


def broken(**fields: Any) -> tuple[JobStatus, str, dict[str, Any]]:
    """After a GPU of node 1 broke: the status, the event, and a pod of the next attempt."""
    message = Termination(
        final=True,
        outcome=Outcome.FAILED,
        time=NOW.timestamp(),
        rank=2,
        error_type="AcceleratorError",
        message="CUDA error: uncorrectable ECC error encountered",
    )
    settings = fields.pop("settings", SETTINGS)
    of = job(**fields)
    of, _ = step(of, seen(of))
    of, _ = step(of, seen(of, running(of, 0), running(of, 1)))
    dead = ended(of, 1, exit_code=1, message=message.model_dump_json(by_alias=True))
    of, _ = step(of, seen(of, running(of, 0), dead))
    of, decision = step(of, seen(of, ended(of, 0, exit_code=143), dead), settings=settings)
    (event,) = (action.message for action in decision.actions if isinstance(action, Emit))
    *_, made = build_children(plan_run(of, attempt=1, settings=settings))
    return of.status, event, made


def test_the_next_attempt_keeps_away_and_says_so() -> None:
    status, event, made = broken()

    first, second = status.attempts
    assert (first.reason, first.k8s_node, second.avoids) == ("GpuHardware", "gpu-1", ("gpu-1",))
    assert event.endswith("attempt 1 starts, away from gpu-1")
    terms = made["spec"]["affinity"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    assert terms[0]["matchFields"][0]["values"] == ["gpu-1"]


@pytest.mark.parametrize(
    "fields",
    [
        {"restartPolicy": {"avoidFailingNodes": False}},
        {"settings": Settings(trainer_image="local", on_cluster=False)},
    ],
    ids=["not wanted", "one machine"],
)
def test_it_goes_anywhere_if_it_may_or_must(fields: dict[str, Any]) -> None:
    status, event, made = broken(**fields)

    assert status.attempts[-1].avoids == ()
    assert event.endswith("attempt 1 starts")
    assert "affinity" not in made["spec"]
