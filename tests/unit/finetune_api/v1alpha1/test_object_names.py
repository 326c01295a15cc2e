"""Tests that a field which names an object accepts only names that Kubernetes accepts."""

from typing import Any

import pytest
from pydantic import ValidationError

from crd import build_crd
from finetune_api.schema.json_schema import iterate_fields
from finetune_api.v1alpha1.dataset import DatasetSource
from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.model_source import ModelSource
from finetune_api.v1alpha1.name_types import is_object_name
from finetune_api.v1alpha1.output import PushToHub
from testing.builders.jobs import UID, RawBody, spec

BAD_NAMES = ("../pods", "a/b", "..", "a?watch=1", "a%2e", "A", "a_b", "-a", "a\n", "a" * 254, "ä", "a..b", "")
CLAIM = {"name": "v", "mountPath": "/v", "persistentVolumeClaim": {"claimName": "NAME"}}
FIELDS: dict[str, dict[str, Any]] = {
    "output claim": {"output": {"persistentVolumeClaim": {"claimName": "NAME"}}},
    "claim of a volume": {"volumes": [CLAIM]},
    "ConfigMap": {"volumes": [{"name": "v", "mountPath": "/v", "configMap": {"name": "NAME"}}]},
    "Secret": {"volumes": [{"name": "v", "mountPath": "/v", "secret": {"secretName": "NAME"}}]},
    "variable": {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "NAME", "key": "k"}}}]},
    "pull secret": {"imagePullSecrets": [{"name": "NAME"}]},
    "service account": {"podTemplate": {"serviceAccountName": "NAME"}},
    "priority class": {"podTemplate": {"priorityClassName": "NAME"}},
    "runtime class": {"podTemplate": {"runtimeClassName": "NAME"}},
}


def fill(fields: Any, name: str) -> Any:
    if isinstance(fields, dict):
        return {key: fill(value, name) for key, value in fields.items()}
    if isinstance(fields, list):
        return [fill(value, name) for value in fields]
    return name if fields == "NAME" else fields


def build_body(fields: dict[str, Any], name: str, *, attempts: list[RawBody] | None = None) -> RawBody:
    status = {"status": {"attempt": 0, "attempts": attempts}} if attempts else {}
    return {"metadata": {"name": "bert", "uid": UID}, "spec": {**spec(), **fill(fields, name)}, **status}


@pytest.mark.parametrize("field", FIELDS)
def test_a_new_job_with_an_invalid_name_is_refused(field: str) -> None:
    FineTuneJob.parse(build_body(FIELDS[field], "team.models-2"))
    for name in BAD_NAMES:
        with pytest.raises(ValidationError, match=r"(?i)name"):
            FineTuneJob.parse(build_body(FIELDS[field], name))
        assert not is_object_name(name)


@pytest.mark.parametrize("field", FIELDS)
def test_a_job_that_has_begun_keeps_a_name_that_an_older_release_accepted(field: str) -> None:
    attempts = [{"attempt": 0, "state": "Running", "created": True}]
    FineTuneJob.parse(build_body(FIELDS[field], "../pods", attempts=attempts))


def test_the_schema_has_a_pattern_for_every_name() -> None:
    """Ratcheting of the API server does not apply below anyOf and oneOf, so that a pattern there would end jobs."""
    schema = build_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    names = {"claimName", "secretName", "serviceAccountName", "priorityClassName", "runtimeClassName", "volumeName"}
    references = {"configMap.name", "secretKeyRef.name", "configMapKeyRef.name", "imagePullSecrets[].name"}
    found = 0
    for path, field, _ in iterate_fields(schema):
        if path.rpartition(".")[2] in names or any(path.endswith(reference) for reference in references):
            assert "pattern" in field, path
            found += 1
        assert "anyOf" not in field, path
        assert "oneOf" not in field, path
    assert found >= 12


@pytest.mark.parametrize(
    "revision",
    ["../../x", "a/../b", "/etc/x", "a//b", "a/", ".x", "a b", "a\nb", "a\x00b", "a\\b", "a?b", "a:b", "a~1", ""],
)
def test_a_revision_that_git_does_not_permit_is_refused(revision: str) -> None:
    """The client of the Hub makes the path of a file from it, and writes there what the server returns."""
    with pytest.raises(ValidationError, match="revision"):
        ModelSource(name="a/b", revision=revision)
    with pytest.raises(ValidationError, match="revision"):
        DatasetSource(name="a/b", revision=revision)


@pytest.mark.parametrize("revision", ["main", "v1.0", "refs/pr/1", "a..b", "版本", "1" * 40, "-x#%1"])
def test_a_revision_that_git_permits_is_accepted(revision: str) -> None:
    assert ModelSource(name="a/b", revision=revision).revision == revision
    assert DatasetSource(name="a/b", revision=revision).revision == revision


def test_a_job_that_has_begun_keeps_a_revision_that_git_does_not_permit() -> None:
    fields = {"model": {"name": "a/b", "revision": "/x"}}
    FineTuneJob.parse(build_body(fields, "", attempts=[{"attempt": 0, "state": "Running", "created": True}]))


@pytest.mark.parametrize("repository", ["../..", "a/..", "./b", "a/.b", "a/b/c"])
def test_a_repository_whose_parts_begin_with_a_dot_is_refused(repository: str) -> None:
    with pytest.raises(ValidationError, match="repo"):
        PushToHub(repo=repository)
