"""Tests of the metrics of single jobs."""

from collections.abc import Iterable
from datetime import timedelta

from prometheus_client import CollectorRegistry

from finetune_api.v1alpha1.status import JobStatus
from finetune_operator.controller.controller import Controller
from finetune_operator.controller.job_cache import JobCache
from finetune_operator.controller.job_metrics import JobMetrics
from finetune_operator.controller.reconcile import PassDependencies
from finetune_operator.kube.cluster import KubernetesCluster
from finetune_operator.metrics import Metrics
from finetune_operator.observation.ownership import RawBody
from testing.builders.fleet import build_fleet, build_job_body
from testing.builders.jobs import NOW, SETTINGS
from testing.fakes.api_client import serve_and_connect
from testing.fakes.http_api import HttpApi

FLEET = build_fleet(NOW)
Labels = dict[str, str]


def collect(
    bodies: Iterable[RawBody] = FLEET, *, max_jobs: int = 100, is_leading: bool = True
) -> dict[str, list[tuple[Labels, float]]]:
    """Return the samples of a scrape by metric, without the prefix."""
    jobs, registry = JobCache(), CollectorRegistry()
    for body in bodies:
        jobs.store_if_newer(body)
    registry.register(JobMetrics(jobs, is_leading=lambda: is_leading, now=lambda: NOW, max_jobs=max_jobs))
    return {
        family.name.removeprefix("finetune_job_"): [(sample.labels, sample.value) for sample in family.samples]
        for family in registry.collect()
    }


def find_values(samples: list[tuple[Labels, float]], **labels: str) -> list[float]:
    return [value for found, value in samples if labels.items() <= found.items()]


def test_each_job_has_its_phase_and_properties() -> None:
    metrics = collect()

    assert {(labels["name"], labels["phase"]) for labels, _ in metrics["phase"]} == {
        ("running", "Running"),
        ("queued", "Queued"),
        ("suspended", "Suspended"),
        ("complete", "Complete"),
        ("failed", "Failed"),
        ("stalled", "Running"),
    }
    (failed,) = (labels for labels, _ in metrics["info"] if labels["name"] == "failed")
    assert (failed["method"], failed["model"], failed["uid"]) == ("command", "", "uid-team-failed")
    (complete,) = (labels for labels, _ in metrics["info"] if labels["namespace"] == "other")
    assert (complete["method"], complete["model"]) == ("sft", "/data/model")


def test_only_pods_that_were_assigned_hold_gpus() -> None:
    metrics = collect()

    assert {labels["name"]: value for labels, value in metrics["gpus"]} == dict.fromkeys(
        ("running", "queued", "suspended", "complete", "failed", "stalled"), 16
    )
    assert {labels["name"]: value for labels, value in metrics["gpus_allocated"]} == {
        **dict.fromkeys(("queued", "suspended", "complete", "failed"), 0),
        **dict.fromkeys(("running", "stalled"), 16),
    }


def test_gpu_seconds_add_up_to_the_held_time_by_phase_and_fault() -> None:
    samples = collect()["gpu_seconds"]

    held = 16 * (4 * 3600 - 20 - 20)
    assert sum(find_values(samples, name="running")) == held
    assert find_values(samples, name="running", phase="starting", fault="infrastructure") == [16 * (0.1 * 3600 - 20)]
    (lost,) = find_values(samples, name="running", phase="lost", fault="infrastructure")
    assert lost == 16 * 3600 * (2.8 / 5 + 0.05)  # a fifth of the steps, and the time until the failure was detected
    assert find_values(samples, name="failed", phase="lost", fault="user") == [16 * (50 * 60 - 60)]


def test_phases_without_time_are_zero_from_the_beginning() -> None:
    samples = collect()["gpu_seconds"]

    for name in ("queued", "suspended"):
        assert find_values(samples, name=name) == [0.0] * 5


def test_values_of_the_last_attempt_are_not_exported_after_the_end() -> None:
    metrics = collect()

    assert {labels["name"] for labels, _ in metrics["progress_ratio"]} == {"running", "complete"}
    for metric, value in (("loss", 1.3), ("eta_seconds", 9000), ("tokens_per_second", 18000)):
        ((labels, exported),) = metrics[metric]
        assert (labels["name"], exported) == ("running", value)


def test_conditions_and_waiting_reasons_are_exported_while_they_apply() -> None:
    metrics = collect()

    assert {(labels["name"], labels["condition"], labels["reason"]) for labels, _ in metrics["condition"]} == {
        ("running", "Degraded", "NetworkSockets"),
        ("stalled", "Stalled", "ReconcileFailed"),
    }
    ((labels, since),) = metrics["waiting_since_timestamp_seconds"]
    assert (labels["name"], labels["reason"]) == ("queued", "Unschedulable")
    assert since == (NOW - timedelta(hours=1)).timestamp()


def test_standby_replica_exports_no_job() -> None:
    assert not any(collect(is_leading=False).values())


def test_number_of_exported_jobs_is_limited_to_unfinished_and_latest_finished_ones() -> None:
    metrics = collect(max_jobs=5)

    assert {labels["name"] for labels, _ in metrics["info"]} == {"running", "queued", "suspended", "stalled", "failed"}
    assert metrics["metrics_omitted"] == [({}, 1.0)]


def test_number_of_series_of_a_job_is_bounded() -> None:
    series = [labels for samples in collect().values() for labels, _ in samples if labels.get("name") == "running"]

    assert len(series) <= 21 + 3  # of one fault


def test_changed_job_is_parsed_again() -> None:
    jobs, registry = JobCache(), CollectorRegistry()
    registry.register(JobMetrics(jobs, is_leading=lambda: True, now=lambda: NOW, max_jobs=10))
    body = build_job_body("a", JobStatus(restarts=1))
    labels = {"namespace": "team", "name": "a"}

    jobs.store_if_newer(body)
    assert registry.get_sample_value("finetune_job_failed_attempts", labels) == 1
    jobs.store_if_newer({**body, "metadata": {**body["metadata"], "resourceVersion": "2"}, "status": {"restarts": 2}})
    assert registry.get_sample_value("finetune_job_failed_attempts", labels) == 2


def test_label_values_are_bounded_and_encodable() -> None:
    body = build_job_body("a", JobStatus(), model={"name": "\ud800" + 500 * "x"})

    ((labels, _),) = collect([body])["info"]

    assert labels["model"] == "?" + 127 * "x"


def test_status_that_cannot_be_parsed_does_not_end_the_scrape() -> None:
    body = build_job_body("a", JobStatus())

    metrics = collect([{**body, "status": {"attempts": [{"attempt": "first"}]}}, *FLEET])

    assert len(metrics["info"]) == 1 + len(FLEET)


async def test_only_jobs_of_the_watched_namespaces_are_exported(api: HttpApi) -> None:
    registry = CollectorRegistry()
    for body in FLEET:
        api.put("finetunejobs", body, namespace=body["metadata"]["namespace"])
    async with serve_and_connect(api) as server:
        dependencies = PassDependencies(KubernetesCluster(server), SETTINGS, lambda: NOW)
        controller = Controller(server, dependencies, Metrics(), namespaces=("other",))
        await controller.resync_jobs()
    registry.register(JobMetrics(controller.jobs, is_leading=lambda: True, now=lambda: NOW, max_jobs=10))

    samples = [sample.labels for family in registry.collect() for sample in family.samples if sample.labels]

    assert {(labels["namespace"], labels["name"]) for labels in samples} == {("other", "complete")}
