"""Tests of the PodGroups and pods of each provider against golden files and the schemas of the providers."""

import re
from typing import Any

import pytest

from finetune_api.v1alpha1.scheduling import API_VERSIONS, SchedulingProvider, SchedulingStatus
from finetune_api.v1alpha1.status import JobStatus
from finetune_operator.plan.manifests import build_children
from finetune_operator.plan.object_metadata import Manifest
from finetune_operator.plan.run_plan import RunPlan, plan_run
from kubernetes_schema import KubernetesSchema, load_kubernetes_schema
from testing.builders.golden import assert_golden
from testing.builders.jobs import SETTINGS, UID, job
from testing.builders.manifests import build_pod_manifests
from testing.schemas.third_party import load_schema

LABEL_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
RACK = {"topology": [{"key": "example.com/rack"}]}
SPECS: dict[str, dict[str, Any]] = {
    "kueue": {
        "provider": "Kueue",
        "queueName": "gpus",
        "priorityClassName": "high",
        "schedulingConstraints": {"topology": [{"key": "example.com/rack", "mode": "Preferred"}]},
    },
    "pod-group": {"provider": "PodGroup", "priorityClassName": "high", "schedulingConstraints": RACK},
    "coscheduling": {"provider": "Coscheduling", "priorityClassName": "high"},
    "volcano": {"provider": "Volcano", "queueName": "gpus", "priorityClassName": "high"},
    "kai": {"provider": "KAI", "queueName": "gpus", "priorityClassName": "train"},
}
FIELDS: dict[str, dict[str, Any]] = {
    "coscheduling": {"podTemplate": {"schedulerName": "scheduler-plugins-scheduler"}},
    "kai": {"podTemplate": {"labels": {"kai.scheduler/node-pool": "h100"}}},
}
WITH_SCHEMA = ("coscheduling", "volcano", "kai")


@pytest.fixture(scope="module")
def kubernetes() -> KubernetesSchema:
    schema = load_kubernetes_schema()
    if schema is None:
        pytest.skip("the Go module of Kubernetes is missing, and Go is not installed")
    return schema


def plan(name: str, *, version: str | None = None, attempt: int = 1, job_name: str = "bert", **fields: Any) -> RunPlan:
    """Return the run plan of an attempt with the provider that has this name in SPECS."""
    provider = SchedulingProvider(SPECS[name]["provider"])
    status = JobStatus(scheduling=SchedulingStatus(provider=provider, api_version=version or API_VERSIONS[provider][0]))
    owner = job(status=status, name=job_name, **{"scheduling": SPECS[name], **FIELDS.get(name, {}), **fields})
    return plan_run(owner, attempt=attempt, settings=SETTINGS)


def get_pod_group(run_plan: RunPlan) -> Manifest:
    [pod_group] = [child for child in build_children(run_plan) if child["kind"] == "PodGroup"]
    return pod_group


@pytest.mark.parametrize("name", SPECS)
def test_manifests_of_each_provider_equal_the_golden_file(name: str) -> None:
    assert_golden(name, build_children(plan(name)), base="two-nodes")


def test_every_provider_has_a_golden_file() -> None:
    assert {spec["provider"] for spec in SPECS.values()} == {provider.value for provider in SchedulingProvider}


@pytest.mark.parametrize("name", WITH_SCHEMA)
def test_pod_groups_and_pods_agree_with_the_schema_of_the_provider(name: str) -> None:
    run_plan, schema = plan(name), load_schema(name)
    pod_group = get_pod_group(run_plan)

    assert [schema.api_version] == list(API_VERSIONS[SchedulingProvider(SPECS[name]["provider"])])
    assert list(schema.find_problems(pod_group)) == []
    for pod in build_pod_manifests(run_plan):
        assert list(schema.find_pod_problems(pod, pod_group["metadata"]["name"])) == []


@pytest.mark.parametrize("name", WITH_SCHEMA)
def test_schema_detects_a_misspelt_field(name: str) -> None:
    pod_group = get_pod_group(plan(name))
    pod_group["spec"]["minMembers"] = pod_group["spec"].pop("minMember")

    assert len(list(load_schema(name).find_problems(pod_group))) == 2


@pytest.mark.parametrize("name", WITH_SCHEMA)
def test_schema_detects_a_pod_of_another_group(name: str) -> None:
    (pod, _) = build_pod_manifests(plan(name))

    assert len(list(load_schema(name).find_pod_problems(pod, "other"))) == 1


@pytest.mark.parametrize("name", SPECS)
def test_pods_and_metadata_agree_with_the_schema_of_kubernetes(name: str, kubernetes: KubernetesSchema) -> None:
    children = build_children(plan(name))

    for child in children:
        document = child if child["kind"] != "PodGroup" else {**build_children(plan("kueue"))[1], **_metadata(child)}
        assert list(kubernetes.find_problems(document)) == []
    assert len(children) == 4 + (name != "kueue")


def _metadata(child: Manifest) -> Manifest:
    return {"metadata": child["metadata"]}


def test_pod_group_of_kubernetes_1_36_agrees_with_its_schema() -> None:
    schema = load_schema("pod-group-v1alpha2")
    run_plan = plan("pod-group", version=schema.api_version)
    pod_group = get_pod_group(run_plan)

    assert list(schema.find_problems(pod_group)) == []
    assert "disruptionMode" not in pod_group["spec"]  # 1.36 has no preemption of groups
    for pod in build_pod_manifests(run_plan):
        assert list(schema.find_pod_problems(pod, pod_group["metadata"]["name"])) == []


@pytest.mark.parametrize("name", [name for name in SPECS if name != "kueue"])
def test_each_attempt_has_a_group_of_its_own_whose_minimum_is_all_pods(name: str) -> None:
    first, second = (get_pod_group(plan(name, attempt=attempt, numNodes=3)) for attempt in (0, 1))

    assert first["metadata"]["name"] != second["metadata"]["name"]
    assert first["spec"] == second["spec"]
    assert 3 in (
        first["spec"].get("minMember"),
        first["spec"].get("schedulingPolicy", {}).get("gang", {}).get("minCount"),
    )


@pytest.mark.parametrize("name", SPECS)
def test_labels_of_the_longest_job_name_are_valid_in_late_attempts(name: str) -> None:
    """The name of the PodGroup is a label of Coscheduling."""
    run_plan = plan(name, attempt=99_999, job_name="a" * 52)

    for child in build_children(run_plan):
        for value in child["metadata"]["labels"].values():
            assert len(value) <= 63
            assert LABEL_VALUE.fullmatch(value)


def test_names_of_groups_differ_between_jobs_with_long_names() -> None:
    """KAI finds the pods of a group by its name in all namespaces, so that names contain the uid."""
    name = get_pod_group(plan("kai", attempt=10, job_name="a" * 52))["metadata"]["name"]

    assert name.endswith(f"-10-{UID[:8]}")


@pytest.mark.parametrize("name", [name for name in SPECS if name != "kueue"])
def test_priority_class_of_the_pod_template_applies_to_the_group(name: str) -> None:
    scheduling = {key: value for key, value in SPECS[name].items() if key != "priorityClassName"}
    template = {**FIELDS.get(name, {}).get("podTemplate", {}), "priorityClassName": "urgent"}
    run_plan = plan(name, scheduling=scheduling, podTemplate=template)

    assert {pod["spec"]["priorityClassName"] for pod in build_pod_manifests(run_plan)} == {"urgent"}
    assert get_pod_group(run_plan)["spec"].get("priorityClassName", "urgent") == "urgent"


@pytest.mark.parametrize(
    ("name", "template", "expected"),
    [
        pytest.param("volcano", {}, "volcano", id="Volcano"),
        pytest.param("kai", {}, "kai-scheduler", id="KAI"),
        pytest.param("volcano", {"schedulerName": "volcano-b"}, "volcano-b", id="another Volcano"),
        pytest.param("coscheduling", {"schedulerName": "gangs"}, "gangs", id="Coscheduling"),
        pytest.param("pod-group", {}, None, id="Kubernetes"),
        pytest.param("kueue", {}, None, id="Kueue"),
    ],
)
def test_scheduler_is_that_of_the_pod_template_or_of_the_provider(
    name: str, template: dict[str, str], expected: str | None
) -> None:
    for pod in build_pod_manifests(plan(name, podTemplate=template)):
        assert pod["spec"].get("schedulerName") == expected


def test_volcano_without_a_queue_uses_its_default_queue() -> None:
    pod_group = get_pod_group(plan("volcano", scheduling={"provider": "Volcano"}))

    assert pod_group["spec"] == {"minMember": 2}


def test_pod_group_of_kai_has_the_node_pool_of_the_pods() -> None:
    """The scheduler of a node pool reads only PodGroups with its label, that of no pool only those without."""
    assert get_pod_group(plan("kai"))["metadata"]["labels"]["kai.scheduler/node-pool"] == "h100"
    assert "kai.scheduler/node-pool" not in get_pod_group(plan("kai", podTemplate={}))["metadata"]["labels"]
