"""Tests of what the fields of a job cannot choose for its pods: namespaces, tokens, the host and reserved names."""

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from crd import build_crd
from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.pod_types import RESERVED_ENV_PREFIXES
from finetune_operator.plan.manifests import build_children
from finetune_operator.plan.run_plan import plan_run
from testing.builders.jobs import SETTINGS, job, spec

ABSENT_FIELDS = {
    *("hostPID", "hostIPC", "hostUsers", "shareProcessNamespace", "nodeName", "hostAliases", "ephemeralContainers"),
    *("initContainers", "automountServiceAccountToken", "serviceAccountToken", "projected", "csi", "externalIPs"),
}


def list_fields(schema: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of each field of a schema; elements of lists and values of maps have the path of their field."""
    for name, child in schema.get("properties", {}).items():
        yield (*path, name)
        yield from list_fields(child, (*path, name))
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from list_fields(schema[key], path)


def list_spec_fields() -> list[tuple[str, ...]]:
    (version,) = build_crd()["spec"]["versions"]
    fields = list(list_fields(version["schema"]["openAPIV3Schema"]["properties"]["spec"]))
    assert len(fields) > 200
    return fields


def test_no_field_of_a_job_refers_to_an_object_of_another_namespace() -> None:
    """An affinity to pods of other namespaces places a pod, and reads nothing of them."""
    fields = [path for path in list_spec_fields() if "namespace" in path[-1].lower()]

    assert {path[-1] for path in fields} == {"namespaces", "namespaceSelector"}
    assert all("podAffinity" in path or "podAntiAffinity" in path for path in fields)


def test_children_are_in_the_namespace_of_their_job() -> None:
    children = build_children(plan_run(job(), attempt=0, settings=SETTINGS))

    assert len(children) == 4
    assert {child["metadata"]["namespace"] for child in children} == {"default"}


def test_a_job_has_no_field_for_processes_of_the_host_init_containers_and_tokens() -> None:
    fields = {path[-1] for path in list_spec_fields()}

    assert fields & ABSENT_FIELDS == set()
    assert {"hostNetwork", "hostPath", "serviceAccountName"} <= fields, "names of fields are those of a pod"


def test_no_pod_of_a_job_gets_an_api_token() -> None:
    """The field of a pod takes precedence over that of its ServiceAccount."""
    children = build_children(
        plan_run(job(podTemplate={"serviceAccountName": "privileged"}), attempt=0, settings=SETTINGS)
    )
    pods = [child["spec"] for child in children if child["kind"] == "Pod"]

    assert [pod["automountServiceAccountToken"] for pod in pods] == [False, False]
    assert [volume for pod in pods for volume in pod["volumes"] if "projected" in volume] == []


@pytest.mark.parametrize(
    "fields",
    [
        *(pytest.param({"env": [{"name": f"{prefix}X", "value": "1"}]}, id=prefix) for prefix in RESERVED_ENV_PREFIXES),
        pytest.param({"podTemplate": {"labels": {"finetune.dev/job-uid": "x"}}}, id="label"),
        pytest.param({"podTemplate": {"labels": {"a.finetune.dev/b": "x"}}}, id="label with a prefix below"),
        pytest.param({"podTemplate": {"annotations": {"finetune.dev/start-key": "x"}}}, id="annotation"),
    ],
)
def test_a_job_cannot_set_variables_labels_and_annotations_of_the_operator(fields: dict[str, Any]) -> None:
    body = {"metadata": {"name": "bert", "uid": "x"}, "spec": spec()}
    FineTuneJob.parse(body)

    with pytest.raises(ValidationError, match=r"reserved|is set by the operator"):
        FineTuneJob.parse({**body, "spec": spec(**fields)})
