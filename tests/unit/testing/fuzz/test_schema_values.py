"""Tests that values generated from a schema are permitted by it, and reach its bounds."""

import random
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from testing.fuzz.cases import load_job_schema
from testing.fuzz.pod_schema import METADATA, STATUS
from testing.fuzz.schema_values import generate_value

NODE: dict[str, Any] = {
    "type": "object",
    "required": ["rank"],
    "properties": {
        "rank": {"type": "integer", "minimum": -3, "maximum": 4},
        "share": {"type": "number", "minimum": 0, "maximum": 1},
        "state": {"enum": ["on", "off"]},
        "name": {"type": "string", "minLength": 2, "maxLength": 5},
        "path": {"type": "string", "pattern": "^/[^:]*$"},
        "peers": {"type": "array", "items": {"$ref": "#/$defs/Peer"}, "minItems": 1, "maxItems": 3},
        "labels": {"type": "object", "additionalProperties": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
    },
    "$defs": {"Peer": {"type": "object", "properties": {"ok": {"type": "boolean"}}}},
}


@pytest.mark.parametrize("schema", [NODE, STATUS, METADATA], ids=["node", "pod status", "pod metadata"])
def test_generated_values_are_permitted(schema: dict[str, Any]) -> None:
    validator = Draft202012Validator(schema)
    values = [generate_value(schema, random.Random(seed)) for seed in range(300)]

    assert [error.message for value in values for error in validator.iter_errors(value)] == []


def test_bounds_are_reached() -> None:
    ranks = {generate_value(NODE, random.Random(seed))["rank"] for seed in range(300)}

    assert {-3, 4} <= ranks <= set(range(-3, 5))


def test_every_field_of_a_spec_and_a_status_is_generated() -> None:
    schema = load_job_schema()
    for part in ("spec", "status"):
        part_schema = schema["properties"][part]
        generated = {name for seed in range(60) for name in generate_value(part_schema, random.Random(seed))}

        assert generated == part_schema["properties"].keys()
