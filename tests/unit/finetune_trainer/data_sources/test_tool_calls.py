"""Tests parsing of tools, tool calls and variables for the chat template, and the errors for malformed ones."""

import json
from typing import Any

import pytest

from finetune_trainer.data_sources.readers import Row
from finetune_trainer.data_sources.tool_calls import ToolCall, parse_template_kwargs, parse_tool_calls, parse_tools
from finetune_trainer.errors import DatasetError
from testing.builders.conversations import WEATHER_TOOL

ORIGIN = "/data/train.jsonl line 7"


@pytest.mark.parametrize(
    "value",
    [
        pytest.param([WEATHER_TOOL], id="list"),
        pytest.param(json.dumps([WEATHER_TOOL]), id="JSON text, as in Parquet files"),
        pytest.param([WEATHER_TOOL["function"]], id="functions without the envelope"),
    ],
)
def test_tools_are_json_schemas_in_the_format_of_inference_servers(value: object) -> None:
    assert parse_tools(Row(ORIGIN, {"tools": value})) == (WEATHER_TOOL,)


@pytest.mark.parametrize("value", [None, [], "", "[]"])
def test_a_row_can_have_no_tools(value: object) -> None:
    assert parse_tools(Row(ORIGIN, {"tools": value})) == ()


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("get_weather", ": expected a list of tools, found text that is not JSON (at character 1: Expecting value)"),
        ({"name": "x"}, ': expected a list of tools, found an object ({"name": "x"})'),
        (["x"], '[0]: expected an object, found text ("x")'),
        ([{"type": "function"}], '[0]: expected a function with name and parameters, found an object ({"type": "fu'),
    ],
)
def test_the_error_for_malformed_tools_contains_origin_and_value(value: object, error: str) -> None:
    with pytest.raises(DatasetError) as raised:
        parse_tools(Row(ORIGIN, {"tools": value}))

    assert str(raised.value).startswith(f"{ORIGIN}, column tools{error}")


@pytest.mark.parametrize(
    ("value", "calls"),
    [
        pytest.param(None, (), id="none"),
        pytest.param([], (), id="empty list"),
        pytest.param(
            [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}],
            (ToolCall("f", {"a": 1}, '{"a":1}', "1"),),
            id="OpenAI",
        ),
        pytest.param([{"name": "f", "arguments": {"a": "é"}}], (ToolCall("f", {"a": "é"}, '{"a": "é"}'),), id="bare"),
        pytest.param({"name": "f"}, (ToolCall("f", {}, "{}"),), id="one call without arguments"),
        pytest.param(
            '[{"name": "f", "arguments": ""}, {"name": "g", "arguments": null}]',
            (ToolCall("f", {}, "{}"), ToolCall("g", {}, "{}")),
            id="JSON text",
        ),
    ],
)
def test_tool_calls_have_several_formats(value: object, calls: tuple[ToolCall, ...]) -> None:
    assert parse_tool_calls(ORIGIN, value) == calls


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ([{"type": "custom", "name": "f"}], '[0].type: expected function, found text ("custom")'),
        ([{"arguments": {}}], "[0].name: expected text, found nothing"),
        ([{"name": "f", "arguments": "city"}], "[0].arguments: expected an object, found text that is not JSON"),
        ([{"name": "f", "arguments": "[1]"}], "[0].arguments: expected an object, found a list ([1])"),
        ([{"name": "f", "id": 7}], "[0].id: expected text, found a number (7)"),
        ([{"function": "f"}], '[0].function: expected an object, found text ("f")'),
    ],
)
def test_the_error_for_a_malformed_tool_call_contains_key_and_value(value: object, error: str) -> None:
    with pytest.raises(DatasetError) as raised:
        parse_tool_calls(ORIGIN, value)

    assert str(raised.value).startswith(f"{ORIGIN}{error}")


@pytest.mark.parametrize(
    ("value", "kwargs"),
    [
        (None, {}),
        ({"enable_thinking": False, "unused": None}, {"enable_thinking": False}),
        ('{"tags": ["a"]}', {"tags": ["a"]}),
    ],
)
def test_variables_for_the_template_are_an_object_or_its_json_text(value: object, kwargs: dict[str, Any]) -> None:
    assert parse_template_kwargs(Row(ORIGIN, {"chat_template_kwargs": value})) == kwargs


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ([1], ": expected an object, found a list ([1])"),
        ({"tokenize": True}, ".tokenize: is set by the trainer; remove it"),
        ({"enable-thinking": True}, ".enable-thinking: expected the name of a variable of the chat template, such as"),
    ],
)
def test_the_error_for_malformed_variables_contains_the_name(value: object, error: str) -> None:
    with pytest.raises(DatasetError) as raised:
        parse_template_kwargs(Row(ORIGIN, {"chat_template_kwargs": value}))

    assert str(raised.value).startswith(f"{ORIGIN}, column chat_template_kwargs{error}")
