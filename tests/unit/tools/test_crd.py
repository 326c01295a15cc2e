"""Tests that the CRD contains the fields, descriptions and rules of the models."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from crd import build_crd, build_json_schema
from field_reference import CONDITIONS, render_reference
from finetune_api.schema.cel_rules import MUTABLE, MUTABLE_WHILE_SUSPENDED, list_spec_rules, list_transition_rules
from finetune_api.v1alpha1.job import FineTuneJobSpec
from finetune_api.v1alpha1.methods import METHODS
from finetune_api.v1alpha1.reasons import Reason

Schema = dict[str, Any]
CRD_VERSION: Schema = build_crd()["spec"]["versions"][0]
OBJECT_SCHEMA: Schema = CRD_VERSION["schema"]["openAPIV3Schema"]
SPEC_SCHEMA: Schema = OBJECT_SCHEMA["properties"]["spec"]
SPEC_FIELDS = {field.alias for field in FineTuneJobSpec.model_fields.values()}


def iterate_schemas(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Yield each schema in the tree with its path."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from iterate_schemas(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from iterate_schemas(schema[key], f"{path}[]")


SCHEMAS_BY_PATH = dict(iterate_schemas(OBJECT_SCHEMA))


def find_spec_schema(path: str) -> Schema:
    """Return the schema of a field in the spec."""
    return SCHEMAS_BY_PATH[f".spec.{path}"]


def test_crd_contains_every_model_field() -> None:
    assert set(SPEC_SCHEMA["properties"]) == SPEC_FIELDS
    assert len(SCHEMAS_BY_PATH) > 150


@pytest.mark.parametrize("keyword", ["anyOf", "$ref", "$defs", "title", "const", "nullable"])
def test_crd_contains_no_keyword_forbidden_in_structural_schemas(keyword: str) -> None:
    assert [path for path, schema in SCHEMAS_BY_PATH.items() if keyword in schema] == []


def test_crd_contains_only_the_defaults_of_the_subresources() -> None:
    defaults = {path: schema["default"] for path, schema in SCHEMAS_BY_PATH.items() if "default" in schema}

    assert defaults == {".spec.numNodes": 1, ".status": {"observedGeneration": -1}}


def test_every_field_has_a_type_and_a_description() -> None:
    untyped_paths = [
        path for path, s in SCHEMAS_BY_PATH.items() if "type" not in s and "x-kubernetes-int-or-string" not in s
    ]
    fields = {path: s for path, s in SCHEMAS_BY_PATH.items() if not path.endswith("[]") and path not in (".metadata",)}

    assert untyped_paths == []
    assert [path for path, schema in fields.items() if not schema.get("description")] == []


def test_exclusive_bounds_are_boolean_flags() -> None:
    assert find_spec_schema("training.learningRate")["minimum"] == 0
    assert find_spec_schema("training.learningRate")["exclusiveMinimum"] is True
    assert find_spec_schema("lora.loraDropout")["exclusiveMaximum"] is True


def test_defaults_appear_only_in_descriptions() -> None:
    assert find_spec_schema("lora.r")["description"] == "Rank of the adapter matrices. Default: 8."


def test_only_two_bounded_objects_preserve_unknown_fields() -> None:
    free_form = [path for path, schema in SCHEMAS_BY_PATH.items() if "x-kubernetes-preserve-unknown-fields" in schema]

    assert sorted(free_form) == [".spec.dataset.chatTemplateKwargs", ".spec.deepspeed.config"]
    assert find_spec_schema("dataset.chatTemplateKwargs")["maxProperties"] == 16
    assert find_spec_schema("deepspeed.config")["maxProperties"] == 64


def test_kubernetes_objects_have_their_fields() -> None:
    term = ".nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[].matchExpressions[].values"

    assert find_spec_schema(f"podTemplate.affinity{term}")["maxItems"] == 32
    assert find_spec_schema("env[].valueFrom.secretKeyRef.key")["maxLength"] == 253
    assert find_spec_schema("volumes[].emptyDir.sizeLimit")["x-kubernetes-int-or-string"] is True


@pytest.mark.parametrize("name", ["env", "volumes", "imagePullSecrets"])
def test_server_side_apply_merges_lists_by_name(name: str) -> None:
    assert SPEC_SCHEMA["properties"][name]["x-kubernetes-list-type"] == "map"
    assert SPEC_SCHEMA["properties"][name]["x-kubernetes-list-map-keys"] == ["name"]


def test_printer_columns_refer_to_status_fields() -> None:
    columns = CRD_VERSION["additionalPrinterColumns"]
    default_columns = [column["name"].upper() for column in columns if "priority" not in column]
    paths = [column["jsonPath"].replace('[?(@.type=="Running")]', "[]") for column in columns]

    assert default_columns == ["PHASE", "NODES", "PROGRESS", "LOSS", "TOKENS/S", "ETA", "RESTARTS", "AGE"]
    assert [column["name"].upper() for column in columns if column.get("priority")] == [
        "REASON",
        "QUEUE",
        "MESSAGE",
    ]
    assert [path for path in paths if path.startswith(".status") and path not in SCHEMAS_BY_PATH] == []


def test_scale_subresource_refers_to_existing_fields() -> None:
    subresources = CRD_VERSION["subresources"]

    assert subresources["status"] == {}
    assert len(subresources["scale"]) == 3
    assert [path for path in subresources["scale"].values() if path not in SCHEMAS_BY_PATH] == []


def test_every_field_is_mutable_or_has_an_immutability_rule() -> None:
    immutable_fields = {rule.field_path for rule in list_transition_rules()}

    assert {f".{field}" for field in SPEC_FIELDS - set(MUTABLE)} == immutable_fields
    assert set(MUTABLE) | set(MUTABLE_WHILE_SUSPENDED) <= SPEC_FIELDS


def test_training_method_rule_contains_every_method() -> None:
    (rule,) = (rule for rule in list_spec_rules() if "training method" in rule.message)

    assert [method for method in METHODS if f"has(self.{method})" not in rule.rule] == []


def test_every_field_path_of_a_rule_exists() -> None:
    paths = [rule.field_path for rule in (*list_spec_rules(), *list_transition_rules()) if rule.field_path]

    assert len(paths) > 20
    assert [path for path in paths if f".spec{path}" not in SCHEMAS_BY_PATH] == []


def test_editor_schema_forbids_unknown_fields_and_contains_defaults() -> None:
    spec = build_json_schema()["properties"]["spec"]

    assert spec["additionalProperties"] is False
    assert spec["properties"]["lora"]["properties"]["r"]["default"] == 8
    assert "x-kubernetes-" not in str(spec)


def test_reference_lists_every_field_and_condition() -> None:
    page = render_reference()
    paths = [
        path.removeprefix(".spec.") for path in SCHEMAS_BY_PATH if path.startswith(".spec.") and not path.endswith("[]")
    ]

    assert len(paths) > 80
    assert [path for path in paths if f"| `{path}` |" not in page] == []
    assert [name for name in CONDITIONS if f"- `{name}`" not in page] == []


def test_reference_lists_every_reason_with_fault_and_meaning() -> None:
    rows = [line for line in render_reference().splitlines() if line.startswith("| `")]
    for reason in Reason:
        (row,) = (row for row in rows if row.startswith(f"| `{reason}` |"))
        assert row == f"| `{reason}` | {reason.fault or ''} | {reason.meaning} |"


def test_operator_folder_is_not_a_package() -> None:
    operator = Path(__file__).parents[3] / "operator"

    assert (operator / "finetune_api" / "__init__.py").exists()
    assert not (operator / "__init__.py").exists(), "it would shadow the standard library's module `operator`"
