"""Tests of parsing untrusted JSON with out-of-range numbers, long strings or deep nesting."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from finetune_api.termination import Termination, parse_termination
from finetune_api.untrusted_json import MAX_INTEGER, parse_untrusted_json
from finetune_api.v1alpha1.status import Progress

PROGRESS = TypeAdapter(Progress)


def parse_termination_fields(**fields: Any) -> Termination | None:
    return parse_termination(json.dumps({"final": True, "outcome": "failed", **fields}))


@pytest.mark.parametrize(
    "number", ["NaN", "Infinity", "-Infinity", "1e999", "1e31", str(MAX_INTEGER + 1), "9" * 5000, "-" + "9" * 30]
)
def test_out_of_range_numbers_are_dropped(number: str) -> None:
    fields = f'"step": 3, "totalSteps": {number}, "loss": {number}, "memory": {{"forecast": {number}}}'

    progress = parse_untrusted_json(PROGRESS, f"{{{fields}}}")

    assert progress is not None
    assert (progress.step, progress.total_steps, progress.loss) == (3, None, None)
    assert progress.memory is not None
    assert progress.memory.forecast is None


@pytest.mark.parametrize("loss", ["nan", "1.5", True])
def test_numbers_of_the_wrong_type_are_rejected(loss: object) -> None:
    assert parse_untrusted_json(PROGRESS, json.dumps({"step": 1, "loss": loss})) is None


@pytest.mark.parametrize("content", ["", "[]", "3", "null", "{", b"\xff", "[" * 100_000, '{"a":' * 100_000])
def test_content_other_than_a_json_object_is_rejected(content: str | bytes) -> None:
    assert parse_untrusted_json(PROGRESS, content) is None


@pytest.mark.parametrize("time", [1e308, 1e15, -1.0, 4_102_444_800.0])
def test_out_of_range_failure_time_is_dropped(time: float) -> None:
    assert parse_termination_fields(time=time) == parse_termination_fields()


@pytest.mark.parametrize("error_type", ["cu" * 2000, "a b", "1Error", "Error\n", "Fehler\u00fc"])
def test_error_type_that_is_not_a_class_name_is_dropped(error_type: str) -> None:
    assert parse_termination_fields(errorType=error_type) == parse_termination_fields()


def test_error_type_can_contain_the_module_name() -> None:
    termination = parse_termination_fields(errorType="torch.distributed.DistBackendError")

    assert termination is not None
    assert termination.error_type == "torch.distributed.DistBackendError"


def test_strings_are_truncated_and_invalid_unicode_is_replaced() -> None:
    termination = parse_termination_fields(message="\ud800" + "x" * 5000)

    assert termination is not None
    assert termination.message == "?" + "x" * 4095


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4),
    max_leaves=20,
)
field_names = st.sampled_from(("step", "loss", "time", "progress", "rank", "message", "errorType", "outcome", "memory"))


@given(value=st.dictionaries(field_names, json_values, max_size=6))
@settings(max_examples=500, deadline=None)
def test_parsing_arbitrary_json_never_raises(value: dict[str, Any]) -> None:
    content = json.dumps(value)

    progress = parse_untrusted_json(PROGRESS, content)
    assert isinstance(parse_termination(content), Termination | None)
    assert isinstance(progress, Progress | None)
