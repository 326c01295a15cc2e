"""Tests that the golden pods have the fields and types of the Kubernetes API."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_operator import names
from kubernetes_schema import load_kubernetes_schema
from testing.builders.golden import FOLDER, IS_UPDATE, read_golden

pytestmark = pytest.mark.skipif(IS_UPDATE, reason="other tests rewrite the golden files")
PATHS = sorted([*FOLDER.rglob("*.yaml"), *FOLDER.rglob("*.diff")])


def is_third_party(document: dict[str, Any]) -> bool:
    """Return whether the object is of another project; test_golden_pods.py compares it with its schema."""
    group = document["apiVersion"].partition("/")[0]
    return bool(document["kind"] == names.POD_GROUP_KIND and group != "scheduling.k8s.io")


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_golden_objects_are_valid_against_the_schema_of_kubernetes(path: Path) -> None:
    schema = load_kubernetes_schema()
    if schema is None:
        pytest.skip("the Go module of Kubernetes is missing, and Go is not installed")
    text = "\n".join(read_golden(path))
    documents = [document for document in yaml.safe_load_all(text) if not is_third_party(document)]

    assert documents
    assert [problem for document in documents for problem in schema.find_problems(document)] == []


def test_every_kind_of_pod_has_a_golden_file() -> None:
    assert len(PATHS) >= 13
