"""Tests that the schemas of Kubernetes types agree with the OpenAPI document of the pinned release."""

from collections.abc import Iterator
from typing import Any

import pytest

from finetune_api.v1alpha1.base import Model
from finetune_api.v1alpha1.kubernetes_types import SCHEMAS
from finetune_api.v1alpha1.placement_types import (
    ContainerResourceClaim,
    PodResourceClaim,
    SchedulingGate,
    TopologySpreadConstraint,
)
from finetune_api.v1alpha1.pod_types import Toleration
from kubernetes_schema import load_kubernetes_schema

Schema = dict[str, Any]

# Fields that the oldest supported release does not have; its API server would drop them from the pods without an error.
NEWER_FIELDS = {
    "ConfigMapVolumeSource.defaultUser",
    "ConfigMapVolumeSource.items[].user",
    "EmptyDirVolumeSource.mode",
    "SecretVolumeSource.defaultUser",
    "SecretVolumeSource.items[].user",
}


def find_differences(schema: Schema, upstream: Schema, definitions: Schema, path: str) -> Iterator[str]:
    """Yield each difference between the fields, types and required fields of both schemas."""
    while "$ref" in upstream or "allOf" in upstream:
        reference = upstream.get("$ref") or upstream["allOf"][0]["$ref"]
        upstream = definitions[reference.rsplit("/", 1)[-1]]
    if "x-kubernetes-int-or-string" in schema:
        if "integer" not in upstream["type"]:
            yield f"{path}: not a quantity"
        return
    if schema["type"] != upstream["type"]:
        yield f"{path}: type {schema['type']} instead of {upstream['type']}"
    if sorted(schema.get("required", ())) != sorted(upstream.get("required", ())):
        yield f"{path}: requires {schema.get('required')} instead of {upstream.get('required')}"
    fields, upstream_fields = schema.get("properties", {}), upstream.get("properties", {})
    differing_fields = {f"{path}.{name}" for name in fields.keys() ^ upstream_fields.keys()} - NEWER_FIELDS
    yield from (f"{field}: only in one schema" for field in sorted(differing_fields))
    for name in fields.keys() & upstream_fields.keys():
        yield from find_differences(fields[name], upstream_fields[name], definitions, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from find_differences(schema[key], upstream[key], definitions, f"{path}[]")


@pytest.mark.parametrize("kubernetes_type", SCHEMAS)
def test_schema_has_the_fields_of_the_kubernetes_type(kubernetes_type: str) -> None:
    kubernetes = load_kubernetes_schema()
    if kubernetes is None:
        pytest.skip("the Go module of Kubernetes is missing, and Go is not installed")
    upstream = kubernetes.definitions[f"io.k8s.api.core.v1.{kubernetes_type}"]

    assert list(find_differences(SCHEMAS[kubernetes_type], upstream, kubernetes.definitions, kubernetes_type)) == []


@pytest.mark.parametrize(
    ("model", "kubernetes_type"),
    [
        (SchedulingGate, "PodSchedulingGate"),
        (PodResourceClaim, "PodResourceClaim"),
        (ContainerResourceClaim, "ResourceClaim"),
        (TopologySpreadConstraint, "TopologySpreadConstraint"),
        (Toleration, "Toleration"),
    ],
)
def test_model_has_the_fields_of_the_kubernetes_type(model: type[Model], kubernetes_type: str) -> None:
    kubernetes = load_kubernetes_schema()
    if kubernetes is None:
        pytest.skip("the Go module of Kubernetes is missing, and Go is not installed")
    upstream = kubernetes.definitions[f"io.k8s.api.core.v1.{kubernetes_type}"]
    required = {field.alias for field in model.model_fields.values() if field.is_required()}

    assert {field.alias for field in model.model_fields.values()} == set(upstream["properties"])
    assert required == set(upstream.get("required", ()))


def iterate_unbounded(schema: Schema, path: str) -> Iterator[str]:
    bound = (
        None
        if "x-kubernetes-int-or-string" in schema
        else {"string": "maxLength", "array": "maxItems"}.get(schema.get("type", ""))
    )
    is_map = isinstance(schema.get("additionalProperties"), dict)
    if (bound and bound not in schema) or (is_map and "maxProperties" not in schema):
        yield path
    for name, child in schema.get("properties", {}).items():
        yield from iterate_unbounded(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from iterate_unbounded(schema[key], f"{path}[]")


def test_every_string_list_and_map_is_bounded() -> None:
    assert [path for name, schema in SCHEMAS.items() for path in iterate_unbounded(schema, name)] == []
