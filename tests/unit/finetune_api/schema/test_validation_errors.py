"""How a job that cannot be read is explained to its author."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from finetune_api.schema.json_schema import fields, inline_schema
from finetune_api.schema.validation_errors import explain, explain_each, explain_unknown
from finetune_api.v1alpha1.job import FineTuneJob, FineTuneJobSpec, TrainerSpec
from testing.builders.jobs import spec

FIELDS = [path for path, _, _ in fields(inline_schema(FineTuneJobSpec))]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=50)
ANYTHING = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=9), inner))


def refusal(**fields: Any) -> ValidationError:
    with pytest.raises(ValidationError) as refused:
        FineTuneJob.parse({"metadata": {"name": "bert"}, "spec": spec(**fields)})
    return refused.value


def test_fields_are_written_as_in_the_file_with_what_was_found() -> None:
    error = refusal(numNodes=0, trainign={}, dataset={"train": [{"name": "a"}, {}]})

    assert set(explain_each(error)) == {
        "spec.dataset.train[1].name: is required",
        "spec.numNodes: must be greater than or equal to 1, found 0",
        "spec.trainign: unknown field; did you mean spec.training?",
    }
    assert explain(error) == "; ".join(explain_each(error))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({"numNodes": 1.5}, "numNodes: must be an integer, found 1.5", id="a fraction"),
        pytest.param({"numNodes": None}, "numNodes: must be an integer, found nothing", id="nothing"),
        pytest.param({"lora": [1]}, "lora: must be an object, found a list", id="a list"),
        pytest.param({"env": {"A": "1"}}, "env: must be a list, found an object", id="an object"),
        pytest.param({"suspend": "maybe"}, 'suspend: must be true or false, found "maybe"', id="no boolean"),
        pytest.param({"dataset": {"train": []}}, "dataset.train: must have at least 1 item, found 0", id="too few"),
        pytest.param(
            {"training": {"reportTo": ["none"] * 5}}, "training.reportTo: must have at most 4 items, found 5", id="many"
        ),
        pytest.param({"model": {"name": ""}}, "model.name: must have at least 1 character, found 0", id="empty"),
        pytest.param(
            {"lora": {"quantization": "int8"}}, "lora.quantization: must be 'nf4', found \"int8\"", id="choice"
        ),
        pytest.param(
            {"training": {"perDeviceTrainBatchSize": 0}},
            "training.perDeviceTrainBatchSize: must be greater than or equal to 1 or 'auto', found 0",
            id="the members of a union make one line, under the field's own name",
        ),
        pytest.param(
            {"resources": {"limits": {"nvidia.com/gpu": []}}},
            "resources.limits.nvidia.com/gpu: must be a string or an integer, found a list",
            id="a union in a map",
        ),
    ],
)
def test_what_it_must_be_and_what_was_found(fields: dict[str, Any], expected: str) -> None:
    assert explain(refusal(**fields)) == f"spec.{expected}"


def test_a_list_with_a_wrong_item_is_not_called_empty() -> None:
    assert explain(refusal(dataset={"train": [{}]})) == "spec.dataset.train[0].name: is required"


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"env": [{"name": "TOKEN", "value": 31337}]}, id="a number for the value of a variable"),
        pytest.param({"env": "TOKEN=31337"}, id="variables in one string"),
        pytest.param({"imagePullSecrets": [{"name": 31337}]}, id="a number for a Secret"),
        pytest.param({"imagePullSecrets": ["31337"]}, id="a secret for an object"),
        pytest.param({"command": {"script": "a.py", "args": "--token=31337"}}, id="arguments in one string"),
        pytest.param({"suspend": "31337" * 9}, id="whatever is long"),
    ],
)
def test_what_may_be_a_secret_is_not_shown(fields: dict[str, Any]) -> None:
    assert "31337" not in explain(refusal(**fields))


def test_a_value_without_its_quotes_gets_them() -> None:
    said = explain(refusal(env=[{"name": "A", "value": 1}, {"name": "B", "value": True}]))

    assert said == (
        "spec.env[0].value: must be a string, found a number: put it in quotes; "
        "spec.env[1].value: must be a string, found true or false: put it in quotes"
    )


@pytest.mark.parametrize(
    ("field", "meant"),
    [
        pytest.param(("spec", "loraa"), "spec.lora", id="one letter more"),
        pytest.param(("spec", "nodes"), "spec.numNodes", id="half of the name"),
        pytest.param(("spec", "training", "learning_rate"), "spec.training.learningRate", id="Python's spelling"),
        pytest.param(("spec", "learningRate"), "spec.training.learningRate", id="a level too high"),
        pytest.param(("spec", "lora", "numNodes"), "spec.numNodes", id="a level too low"),
        pytest.param(("sft",), "spec.sft", id="outside of spec"),
        pytest.param(("specc",), "spec", id="spec itself"),
        pytest.param(("spec", "dataset", "train", 1, "splt"), "spec.dataset.train[1].split", id="in an item"),
        pytest.param(
            ("spec", "training", "perDeviceBatchSize"),
            "spec.training.perDeviceEvalBatchSize or spec.training.perDeviceTrainBatchSize",
            id="one of two",
        ),
    ],
)
def test_an_unknown_field_is_told_which_was_meant(field: tuple[int | str, ...], meant: str) -> None:
    assert explain_unknown(field) == f"unknown field; did you mean {meant}?"


@pytest.mark.parametrize("field", [("spec", "method"), ("spec", "name"), ("spec", "nothingLikeIt"), (1,)], ids=str)
def test_no_field_is_guessed(field: tuple[int | str, ...]) -> None:
    assert explain_unknown(field) == "unknown field"


def test_a_spec_alone_is_told_as_part_of_its_job() -> None:
    with pytest.raises(ValidationError) as refused:
        TrainerSpec.model_validate(spec(numNodes=0))
    assert explain(refused.value, within="spec") == "spec.numNodes: must be greater than or equal to 1, found 0"

    with pytest.raises(ValidationError) as refused:
        TrainerSpec.model_validate_json("{")
    assert explain(refused.value, within="spec").startswith("spec: Invalid JSON: EOF while parsing")


@given(ANYTHING)
def test_whatever_is_written_is_told_in_its_field_and_never_in_words_of_python(value: object) -> None:
    for path in FIELDS:
        for line in explain_each_of(path, value):
            assert line.startswith("spec")
            assert not any(words in line for words in ("Input", "Tuple", "tuple", "dict", "constrained", "literal[")), (
                line
            )


def explain_each_of(path: str, value: object) -> tuple[str, ...]:
    """What is said of a job with `value` at `spec.<path>`."""
    *parents, last = path.split(".")
    written: dict[str, Any] = {last: value}
    for part in reversed(parents):
        written = {part.removesuffix("[]"): [written] if part.endswith("[]") else written}
    try:
        FineTuneJob.parse({"metadata": {"name": "bert"}, "spec": spec(**written)})
    except ValidationError as error:
        return explain_each(error)
    return ()
