"""Tests that every status that the operator writes satisfies the schema of the CRD."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft4Validator

from finetune_api.schema.status_schema import bound_status, bound_value, build_status_schema
from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, Condition, Evidence, JobStatus, Phase
from testing.builders.jobs import NOW

Schema = dict[str, Any]
SCHEMA = build_status_schema()


def iterate_leaves(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    for name, child in schema.get("properties", {}).items():
        yield f"{path}.{name}", child
        yield from iterate_leaves(child, f"{path}.{name}")
    if "items" in schema:
        yield f"{path}[]", schema["items"]
        yield from iterate_leaves(schema["items"], f"{path}[]")


FIELDS = dict(iterate_leaves(SCHEMA))


def build_values(schema: Schema) -> st.SearchStrategy[Any]:
    """Return a strategy for values of the schema's types without its bounds."""
    match schema.get("type"):
        case "object":
            children = {name: build_values(child) for name, child in schema.get("properties", {}).items()}
            return st.fixed_dictionaries({}, optional=children)
        case "array":
            return st.lists(build_values(schema["items"]), max_size=3)
        case "integer":
            return st.integers()
        case "number":
            return st.floats(allow_nan=False, allow_infinity=False)
        case "boolean":
            return st.booleans()
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    return st.one_of(st.text(), st.sampled_from(("训" * 3000, "\x01" * 3000, "<" * 3000, "a" * 5000)))


def test_every_string_integer_and_list_is_bounded() -> None:
    required = {"string": "maxLength", "integer": "maximum", "array": "maxItems"}
    unbounded = [
        path
        for path, schema in FIELDS.items()
        if (key := required.get(schema["type"])) and not {key, "enum", "format"} & schema.keys()
    ]
    assert len(FIELDS) > 100
    assert unbounded == []


def test_values_of_a_newer_operator_are_accepted() -> None:
    assert [path for path, schema in FIELDS.items() if "enum" in schema] == [".conditions[].status"]
    assert "Known values: Queued, Starting" in FIELDS[".phase"]["description"]


@settings(max_examples=200, deadline=None)
@given(value=build_values(SCHEMA))
def test_bounded_values_satisfy_the_schema(value: Any) -> None:
    errors = Draft4Validator(SCHEMA).iter_errors(bound_value(value, SCHEMA))

    assert [error.message for error in errors if error.validator != "required"] == []


@pytest.mark.parametrize("text", ["训" * 9000, "\x01" * 9000, "a" * 9000, "</" * 9000])
@pytest.mark.parametrize("number", [2**200, -(2**200)])
def test_hostile_observations_are_bounded_and_the_rest_is_kept(text: str, number: int) -> None:
    evidence = Evidence(node_rank=3, message=text, k8s_node=text, error_type=text, rank=number, exit_code=number)
    record = AttemptRecord(attempt=1, state=AttemptState.STOPPING, message=text, evidence=(evidence,), last_step=number)
    condition = Condition(type="Failed", status="True", last_transition_time=NOW, reason=text, message=text)
    status = JobStatus(phase=Phase.RUNNING, attempts=(record,), conditions=(condition,), start_time=NOW)

    bounded = bound_status(status)

    body = bounded.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert [error.message for error in Draft4Validator(SCHEMA).iter_errors(body)] == []
    assert bound_status(bounded) is bounded
    assert (bounded.phase, bounded.start_time, bounded.attempts[0].evidence[0].node_rank) == (Phase.RUNNING, NOW, 3)
    assert text.startswith(bounded.attempts[0].evidence[0].message)
