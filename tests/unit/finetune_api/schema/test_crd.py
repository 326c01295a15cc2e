"""The CRD has the fields, texts and rules of the models, in the form that the API server accepts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune_api.schema.cel_rules import MUTABLE, MUTABLE_WHILE_SUSPENDED, spec_rules, transition_rules
from finetune_api.schema.crd import build_crd, build_json_schema
from finetune_api.schema.reference import CONDITIONS, render_reference
from finetune_api.v1alpha1.job import FineTuneJobSpec
from finetune_api.v1alpha1.methods import METHODS
from finetune_api.v1alpha1.reasons import Reason

Schema = dict[str, Any]
VERSION: Schema = build_crd()["spec"]["versions"][0]
OBJECT: Schema = VERSION["schema"]["openAPIV3Schema"]
SPEC: Schema = OBJECT["properties"]["spec"]
FIELDS = {field.alias for field in FineTuneJobSpec.model_fields.values()}


def nodes(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Yield every schema of the tree with its path."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from nodes(schema[key], f"{path}[]")


ALL = dict(nodes(OBJECT))


def spec_field(path: str) -> Schema:
    """Return the schema of a field of the spec."""
    return ALL[f".spec.{path}"]


def test_the_crd_contains_every_field_of_the_models() -> None:
    assert set(SPEC["properties"]) == FIELDS
    assert len(ALL) > 150


@pytest.mark.parametrize("keyword", ["anyOf", "$ref", "$defs", "default", "title", "const", "nullable"])
def test_no_keyword_remains_that_structural_schemas_forbid(keyword: str) -> None:
    assert [path for path, schema in ALL.items() if keyword in schema] == []


def test_every_field_has_a_type_and_a_description() -> None:
    untyped = [path for path, s in ALL.items() if "type" not in s and "x-kubernetes-int-or-string" not in s]
    fields = {path: s for path, s in ALL.items() if not path.endswith("[]") and path not in (".metadata",)}

    assert untyped == []
    assert [path for path, schema in fields.items() if not schema.get("description")] == []


def test_exclusive_bounds_are_flags() -> None:
    assert spec_field("training.learningRate")["minimum"] == 0
    assert spec_field("training.learningRate")["exclusiveMinimum"] is True
    assert spec_field("lora.loraDropout")["exclusiveMaximum"] is True


def test_a_default_appears_only_in_the_description() -> None:
    assert spec_field("lora.r")["description"] == "Rank of the adapter matrices. Default: 8."


def test_raw_objects_preserve_unknown_fields() -> None:
    assert spec_field("podTemplate.affinity")["x-kubernetes-preserve-unknown-fields"] is True


@pytest.mark.parametrize("name", ["env", "volumes", "imagePullSecrets"])
def test_server_side_apply_merges_named_lists(name: str) -> None:
    assert SPEC["properties"][name]["x-kubernetes-list-type"] == "map"
    assert SPEC["properties"][name]["x-kubernetes-list-map-keys"] == ["name"]


def test_the_printer_columns_refer_to_status_fields() -> None:
    columns = VERSION["additionalPrinterColumns"]
    default_columns = [column["name"].upper() for column in columns if "priority" not in column]
    paths = [column["jsonPath"].replace('[?(@.type=="Running")]', "[]") for column in columns]

    assert default_columns == ["PHASE", "NODES", "PROGRESS", "LOSS", "TOKENS/S", "ETA", "RESTARTS", "AGE"]
    assert [column["name"].upper() for column in columns if column.get("priority")] == ["REASON", "MESSAGE"]
    assert [path for path in paths if path.startswith(".status") and path not in ALL] == []


def test_only_the_status_is_a_subresource() -> None:
    assert VERSION["subresources"] == {"status": {}}


def test_every_field_is_mutable_or_has_an_immutability_rule() -> None:
    with_rule = {rule.field_path for rule in transition_rules()}

    assert {f".{field}" for field in FIELDS - set(MUTABLE)} == with_rule
    assert set(MUTABLE) | set(MUTABLE_WHILE_SUSPENDED) <= FIELDS


def test_the_rule_for_one_method_contains_every_method() -> None:
    (rule,) = (rule for rule in spec_rules() if "training method" in rule.message)

    assert [method for method in METHODS if f"has(self.{method})" not in rule.rule] == []


def test_field_paths_of_rules_exist() -> None:
    paths = [rule.field_path for rule in (*spec_rules(), *transition_rules()) if rule.field_path]

    assert len(paths) > 20
    assert [path for path in paths if f".spec{path}" not in ALL] == []


def test_the_editor_schema_forbids_unknown_fields_and_contains_defaults() -> None:
    spec = build_json_schema()["properties"]["spec"]

    assert spec["additionalProperties"] is False
    assert spec["properties"]["lora"]["properties"]["r"]["default"] == 8
    assert "x-kubernetes-" not in str(spec)


def test_the_reference_lists_every_field_and_condition() -> None:
    page = render_reference()
    paths = [path.removeprefix(".spec.") for path in ALL if path.startswith(".spec.") and not path.endswith("[]")]

    assert len(paths) > 80
    assert [path for path in paths if f"| `{path}` |" not in page] == []
    assert [name for name in CONDITIONS if f"- `{name}`" not in page] == []


def test_the_reference_lists_every_reason_with_fault_and_meaning() -> None:
    rows = [line for line in render_reference().splitlines() if line.startswith("| `")]
    for reason in Reason:
        (row,) = (row for row in rows if row.startswith(f"| `{reason}` |"))
        assert row == f"| `{reason}` | {reason.fault or ''} | {reason.meaning} |"


def test_the_operator_folder_is_not_a_package() -> None:
    operator = Path(__file__).parents[4] / "operator"

    assert (operator / "finetune_api" / "__init__.py").exists()
    assert not (operator / "__init__.py").exists(), "it would shadow the standard library's module `operator`"
