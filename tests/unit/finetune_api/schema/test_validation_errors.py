"""Tests of the error messages for invalid jobs."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from finetune_api.schema.json_schema import inline_schema, iterate_fields
from finetune_api.schema.validation_errors import (
    explain_invalid_fields,
    explain_unknown_field,
    explain_validation_error,
)
from finetune_api.v1alpha1.job import FineTuneJob, FineTuneJobSpec, TrainerSpec
from testing.builders.jobs import spec

FIELD_PATHS = [path for path, _, _ in iterate_fields(inline_schema(FineTuneJobSpec))]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=50)
JSON_VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=9), inner))


def parse_invalid_job(**fields: Any) -> ValidationError:
    with pytest.raises(ValidationError) as error_info:
        FineTuneJob.model_validate({"metadata": {"name": "bert"}, "spec": spec(**fields)})
    return error_info.value


def test_errors_contain_the_field_path_and_the_value_found() -> None:
    error = parse_invalid_job(numNodes=0, trainign={}, dataset={"train": [{"name": "a"}, {}]})

    assert set(explain_invalid_fields(error)) == {
        "spec.dataset.train[1].name: is required",
        "spec.numNodes: must be greater than or equal to 1, found 0",
        "spec.trainign: unknown field; did you mean spec.training?",
    }
    assert explain_validation_error(error) == "; ".join(explain_invalid_fields(error))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({"numNodes": 1.5}, "numNodes: must be an integer, found 1.5", id="fraction"),
        pytest.param({"numNodes": None}, "numNodes: must be an integer, found nothing", id="null"),
        pytest.param({"lora": [1]}, "lora: must be an object, found a list", id="list for an object"),
        pytest.param({"env": {"A": "1"}}, "env: must be a list, found an object", id="object for a list"),
        pytest.param({"suspend": "maybe"}, 'suspend: must be true or false, found "maybe"', id="string for a boolean"),
        pytest.param(
            {"dataset": {"train": []}}, "dataset.train: must have at least 1 item, found 0", id="too few items"
        ),
        pytest.param(
            {"training": {"reportTo": ["none"] * 5}},
            "training.reportTo: must have at most 4 items, found 5",
            id="too many items",
        ),
        pytest.param({"model": {"name": ""}}, "model.name: must have at least 1 character, found 0", id="empty string"),
        pytest.param(
            {"lora": {"quantization": "int8"}}, "lora.quantization: must be 'nf4', found \"int8\"", id="unknown choice"
        ),
        pytest.param(
            {"training": {"perDeviceTrainBatchSize": 0}},
            "training.perDeviceTrainBatchSize: must be greater than or equal to 1 or 'auto', found 0",
            id="union",
        ),
        pytest.param(
            {"resources": {"limits": {"nvidia.com/gpu": []}}},
            "resources.limits.nvidia.com/gpu: must be a string or an integer, found a list",
            id="union in a map",
        ),
    ],
)
def test_error_contains_the_expected_and_the_found_value(fields: dict[str, Any], expected: str) -> None:
    assert explain_validation_error(parse_invalid_job(**fields)) == f"spec.{expected}"


def test_list_with_an_invalid_item_is_not_reported_as_too_short() -> None:
    assert (
        explain_validation_error(parse_invalid_job(dataset={"train": [{}]}))
        == "spec.dataset.train[0].name: is required"
    )


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"env": [{"name": "TOKEN", "value": 31337}]}, id="number for the value of a variable"),
        pytest.param({"env": "TOKEN=31337"}, id="variables in one string"),
        pytest.param({"imagePullSecrets": [{"name": 31337}]}, id="number for the name of a Secret"),
        pytest.param({"imagePullSecrets": ["31337"]}, id="string for an object"),
        pytest.param({"command": {"script": "a.py", "args": "--token=31337"}}, id="arguments in one string"),
        pytest.param({"suspend": "31337" * 9}, id="long string"),
    ],
)
def test_value_that_may_be_a_secret_is_not_quoted(fields: dict[str, Any]) -> None:
    assert "31337" not in explain_validation_error(parse_invalid_job(**fields))


def test_number_in_place_of_a_string_suggests_quotes() -> None:
    message = explain_validation_error(parse_invalid_job(env=[{"name": "A", "value": 1}, {"name": "B", "value": True}]))

    assert message == (
        "spec.env[0].value: must be a string, found a number: put it in quotes; "
        "spec.env[1].value: must be a string, found true or false: put it in quotes"
    )


@pytest.mark.parametrize(
    ("field", "suggestion"),
    [
        pytest.param(("spec", "loraa"), "spec.lora", id="typo"),
        pytest.param(("spec", "nodes"), "spec.numNodes", id="incomplete name"),
        pytest.param(("spec", "training", "learning_rate"), "spec.training.learningRate", id="snake case"),
        pytest.param(("spec", "learningRate"), "spec.training.learningRate", id="field of a nested object"),
        pytest.param(("spec", "lora", "numNodes"), "spec.numNodes", id="field of the parent object"),
        pytest.param(("sft",), "spec.sft", id="field of the spec at top level"),
        pytest.param(("specc",), "spec", id="typo of spec"),
        pytest.param(("spec", "dataset", "train", 1, "splt"), "spec.dataset.train[1].split", id="item of a list"),
        pytest.param(
            ("spec", "training", "perDeviceBatchSize"),
            "spec.training.perDeviceEvalBatchSize or spec.training.perDeviceTrainBatchSize",
            id="two similar fields",
        ),
    ],
)
def test_unknown_field_suggests_a_similar_field(field: tuple[int | str, ...], suggestion: str) -> None:
    assert explain_unknown_field(field) == f"unknown field; did you mean {suggestion}?"


@pytest.mark.parametrize("field", [("spec", "method"), ("spec", "name"), ("spec", "nothingLikeIt"), (1,)], ids=str)
def test_unknown_field_without_a_similar_field_has_no_suggestion(field: tuple[int | str, ...]) -> None:
    assert explain_unknown_field(field) == "unknown field"


def test_error_in_a_spec_contains_the_path_in_the_job() -> None:
    with pytest.raises(ValidationError) as error_info:
        TrainerSpec.model_validate(spec(numNodes=0))
    assert (
        explain_validation_error(error_info.value, parent_path="spec")
        == "spec.numNodes: must be greater than or equal to 1, found 0"
    )

    with pytest.raises(ValidationError) as error_info:
        TrainerSpec.model_validate_json("{")
    assert explain_validation_error(error_info.value, parent_path="spec").startswith(
        "spec: Invalid JSON: EOF while parsing"
    )


PYTHON_TERMS = ("Input", "Tuple", "tuple", "dict", "constrained", "literal[")


@given(JSON_VALUES)
@example({"dict": None})
def test_error_for_any_value_contains_its_field_and_no_python_terms(value: object) -> None:
    for path in FIELD_PATHS:
        for line in explain_value(path, value):
            assert line.startswith("spec")
            found_terms = [term for term in PYTHON_TERMS if term in line and term not in repr(value)]
            assert not found_terms, line


def explain_value(path: str, value: object) -> tuple[str, ...]:
    """Return the messages for a job with this value at `spec.<path>`."""
    *parents, field = path.split(".")
    fields: dict[str, Any] = {field: value}
    for part in reversed(parents):
        fields = {part.removesuffix("[]"): [fields] if part.endswith("[]") else fields}
    try:
        FineTuneJob.parse({"metadata": {"name": "bert"}, "spec": spec(**fields)})
    except ValidationError as error:
        return explain_invalid_fields(error)
    return ()
