"""Tests that the floor of `make bench` sends the requests that a job needs, and of the figures and tables."""

import json
import math

import pytest

from benchmarks.load.contender import ControllerMetrics
from benchmarks.load.figures import summarise_turn
from benchmarks.load.floor_requests import render_attempts, render_status_write
from benchmarks.load.job_bodies import build_job_body, build_killed_pod
from benchmarks.load.pod_times import AttemptKey, identify_pod
from benchmarks.load.report import render_comparison
from benchmarks.load.turn import BurstResult, JobDurations, LoadSize, TurnResult
from benchmarks.load.usage import CLUSTER_PROGRAMS, CONTROLLERS, Usage, count_api_requests
from benchmarks.rig import NAMESPACE
from finetune_api.v1alpha1.job import FineTuneJob
from finetune_operator.core.actions import Create
from finetune_operator.observation.pods import Observation
from testing.builders.jobs import UID, decide_once

NODES = 3


def test_floor_creates_the_objects_that_the_operator_creates() -> None:
    metadata = {"name": "bert", "namespace": NAMESPACE, "uid": UID, "generation": 1, "resourceVersion": "1"}
    job = FineTuneJob.parse({**build_job_body("bert", NODES), "metadata": metadata})
    observation = Observation(nodes=(), service_exists=False, is_fresh=True)
    job, _ = decide_once(job, observation)
    _, decision = decide_once(job, observation)

    first, second = render_attempts("bert", nodes=NODES)
    created = [json.loads(create.content) for create in (*first.objects, *first.pods)]
    assert created == [action.manifest for action in decision.actions if isinstance(action, Create)]
    assert [create.kind for create in (*second.objects, *second.pods)] == ["ConfigMap", *["Pod"] * NODES]
    assert {json.loads(create.content)["metadata"]["name"] for create in second.pods} == {
        f"bert-1-{rank}" for rank in range(NODES)
    }


def test_floor_writes_the_statuses_of_a_restart() -> None:
    first, second = render_attempts("bert", nodes=NODES)

    statuses = (first.starting, first.running, first.stopping, second.starting, second.running)
    states = [[attempt["state"] for attempt in json.loads(status)["attempts"]] for status in statuses]
    assert states == [["Starting"], ["Running"], ["Stopping"], ["Failed", "Starting"], ["Failed", "Running"]]
    metadata = {"name": "bert", "namespace": NAMESPACE, "uid": "a", "resourceVersion": "7", "managedFields": []}
    written = json.loads(render_status_write({**build_job_body("bert", NODES), "metadata": metadata}, first.running))
    assert written["status"] == json.loads(first.running)
    assert "managedFields" not in written["metadata"]


@pytest.mark.parametrize(
    "labels",
    [
        pytest.param(
            {"finetune.dev/job-name": "bert", "finetune.dev/attempt": "1", "finetune.dev/node-rank": "2"}, id="operator"
        ),
        pytest.param(
            {
                "jobset.sigs.k8s.io/jobset-name": "bert",
                "jobset.sigs.k8s.io/restart-attempt": "1",
                "batch.kubernetes.io/job-completion-index": "2",
            },
            id="Kubeflow",
        ),
    ],
)
def test_pods_of_all_contenders_are_identified_by_their_labels(labels: dict[str, str]) -> None:
    assert identify_pod({"metadata": {"labels": labels}}) == (AttemptKey("bert", 1), 2)


def test_killed_pod_has_failed_and_is_replaced_unconditionally() -> None:
    pod = {
        "metadata": {"name": "p", "resourceVersion": "3"},
        "spec": {"containers": [{"name": "node"}]},
        "status": {"phase": "Running", "podIP": "10.0.0.1"},
    }

    killed = build_killed_pod(pod)

    assert killed["metadata"] == {"name": "p"}
    assert (killed["status"]["phase"], killed["status"]["podIP"]) == ("Failed", "10.0.0.1")
    assert killed["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 1
    assert killed["status"]["containerStatuses"][0]["name"] == "node"


def test_watches_leases_and_requests_without_a_resource_are_not_counted() -> None:
    metrics = "\n".join(
        f'apiserver_request_total{{code="200",resource="{resource}",subresource="{subresource}",verb="{verb}"}} {count}'
        for verb, resource, subresource, count in (
            ("POST", "pods", "", 4),
            ("PUT", "finetunejobs", "status", 3),
            ("WATCH", "pods", "", 100),
            ("PUT", "leases", "", 100),
            ("GET", "", "/metrics", 100),
        )
    )

    assert count_api_requests(f"{metrics}\nother_total{{}} 5\n") == 7


def build_turn(*, running: tuple[float, ...], controllers: float | None) -> TurnResult:
    seconds = dict.fromkeys(CLUSTER_PROGRAMS, 1.0) | ({} if controllers is None else {CONTROLLERS: controllers})
    durations = [JobDurations(created=value / 2, running=value) for value in running]
    burst = BurstResult(durations, Usage(seconds, 40.0, ControllerMetrics()))
    return TurnResult(durations, durations, burst, burst, memory_mib=0.0)


def test_figures_of_a_turn_count_jobs_that_never_ran() -> None:
    figures = summarise_turn(build_turn(running=(2.0, 4.0, 300.0), controllers=None), LoadSize(3, 4, 3))

    assert figures["restart of 3 x 4, all running, p50"] == 4.0
    assert figures["restart of 3 x 4, all running, p99"] == 300.0
    assert figures["restart: jobs not running after 300 s"] == 1
    assert figures["CPU of both bursts, all programs"] == 2.0 * len(CLUSTER_PROGRAMS)
    assert math.isnan(figures["CPU of both bursts, controllers"])
    assert figures["API requests per job, launch"] == pytest.approx(40 / 3)


def test_ratio_is_the_median_of_the_ratios_of_all_rounds() -> None:
    rounds = {
        "operator": [{"restart": 2.0, "cpu": 1.0}, {"restart": 3.0, "cpu": 1.0}, {"restart": 12.0, "cpu": 1.0}],
        "floor": [{"restart": 1.0, "cpu": math.nan}, {"restart": 2.0, "cpu": math.nan}, {"restart": 10.0, "cpu": 3.0}],
    }

    header, restart, cpu = render_comparison(rounds, own_title="operator").splitlines()

    assert header.split() == ["operator", "floor", "operator/floor"]
    assert restart.split("  ")[-1] == "1.50 (1.20 to 2)"
    assert cpu.split()[-2:] == ["-", "-"]
