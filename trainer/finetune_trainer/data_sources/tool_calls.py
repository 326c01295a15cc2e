"""Parses the tools of a row, the tool calls of its messages, and its arguments for the chat template."""

import json
from dataclasses import dataclass
from typing import Any

from finetune_api.v1alpha1.chat_template_kwargs import describe_invalid_name
from finetune_supervisor.contract import parse_json
from finetune_trainer.data_sources.column_values import check_object, check_text
from finetune_trainer.data_sources.readers import Row, describe_value
from finetune_trainer.errors import DatasetError

JsonObject = dict[str, Any]


@dataclass(frozen=True)
class ToolCall:
    """Call of a tool by an assistant turn."""

    name: str
    arguments: JsonObject
    arguments_text: str  # the arguments as JSON, as in the row if they are text there
    call_id: str | None = None


def parse_tools(row: Row) -> tuple[JsonObject, ...]:
    """Return the JSON schemas in the column `tools`, which is a list or its JSON text, or an empty tuple.

    A function without the envelope `{"type": "function", "function": ...}` is put into one, as inference servers expect
    it. Raises: DatasetError.
    """
    location = f"{row.origin}, column tools"
    value = _parse_json_text(location, row.columns.get("tools"), expected="a list of tools")
    if not value:
        return ()
    if not isinstance(value, list):
        raise DatasetError(f"{location}: expected a list of tools, found {describe_value(value)}")
    tools = []
    for index, item in enumerate(value):
        tool = check_object(f"{location}[{index}]", item)
        function = tool.get("function", tool)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DatasetError(
                f"{location}[{index}]: expected a function with name and parameters, found {describe_value(item)}"
            )
        tools.append(tool if "function" in tool else {"type": "function", "function": tool})
    return tuple(tools)


def parse_template_kwargs(row: Row) -> JsonObject:
    """Return the object in the column `chat_template_kwargs`, or an empty object. Raises: DatasetError."""
    location = f"{row.origin}, column chat_template_kwargs"
    value = _parse_json_text(location, row.columns.get("chat_template_kwargs"), expected="an object")
    kwargs = check_object(location, value) if value is not None else {}
    for name in kwargs:
        if problem := describe_invalid_name(name):
            raise DatasetError(f"{location}.{name}: {problem}")
    return {name: item for name, item in kwargs.items() if item is not None}


def parse_tool_calls(location: str, value: object) -> tuple[ToolCall, ...]:
    """Parse one tool call or a list of tool calls, as values or as JSON text, in OpenAI or bare format.

    Raises: DatasetError whose message begins with `location`.
    """
    value = _parse_json_text(location, value, expected="a list of tool calls")
    if not value:
        return ()
    if not isinstance(value, list):
        return (_parse_tool_call(location, value),)
    return tuple(_parse_tool_call(f"{location}[{index}]", call) for index, call in enumerate(value))


def _parse_tool_call(location: str, value: object) -> ToolCall:
    call = check_object(location, value)
    if call.get("type", "function") not in ("function", None):
        raise DatasetError(f"{location}.type: expected function, found {describe_value(call['type'])}")
    function = check_object(f"{location}.function", call["function"]) if call.get("function") else call
    name = check_text(f"{location}.name", function.get("name"))
    arguments = function.get("arguments")
    parsed = _parse_json_text(f"{location}.arguments", arguments, expected="an object")
    parsed = {} if parsed is None else check_object(f"{location}.arguments", parsed)
    text = arguments if isinstance(arguments, str) and arguments.strip() else json.dumps(parsed, ensure_ascii=False)
    call_id = call.get("id")
    return ToolCall(name, parsed, text, None if call_id is None else check_text(f"{location}.id", call_id))


def _parse_json_text(location: str, value: object, *, expected: str) -> object:
    """Return the value, parsed as JSON if it is text; blank text is None. Raises: DatasetError."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return parse_json(value)
    except json.JSONDecodeError as error:
        raise DatasetError(
            f"{location}: expected {expected}, found text that is not JSON (at character {error.pos + 1}: {error.msg})"
        ) from error
