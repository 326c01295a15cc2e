"""Tests parsing of messages with reasoning and tools, and the errors for malformed columns of messages."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from finetune_trainer.data_sources.messages import OPENAI, SHAREGPT, MessageFormat, Role, Turn, parse_messages
from finetune_trainer.data_sources.readers import Row
from finetune_trainer.data_sources.tool_calls import ToolCall
from finetune_trainer.errors import DatasetError

ORIGIN = "/data/train.jsonl line 7"
CALL = {"name": "get_weather", "arguments": {"city": "Bern"}}
MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ([], "column messages: expected a list of turns, found a list ([])"),
        ("no list", "column messages: expected a list of turns, found text that is not JSON"),
        ([7], "column messages[0]: expected an object, found a number (7)"),
        (
            [{"role": "bot", "content": "x"}],
            "messages[0].role: expected system, developer, user, assistant, tool, tool_response or tool_call, found"
            ' text ("bot")',
        ),
        ([MESSAGES[0], {"role": "assistant", "content": None}], "messages[1].content: expected text, found nothing"),
        (
            [{"role": "user", "content": [{"type": "image"}]}],
            "content[0]: expected the image here (image, path or image_url) or in a column images",
        ),
        (
            [MESSAGES[0], {**MESSAGES[1], "weight": 2}],
            "messages[1].weight: expected a number from 0 to 1, found a number (2)",
        ),
        (
            [{"role": "user", "content": "q", "reasoning_content": "hm"}],
            "messages[0]: expected reasoning only in assistant messages, found it in a user message",
        ),
        (
            [{"role": "tool", "content": "x", "tool_calls": [CALL]}],
            "messages[0]: expected tool_calls only in assistant messages, found it in a tool message",
        ),
        (
            [{**MESSAGES[1], "thinking": "a", "reasoning": "b"}],
            "messages[0]: expected one reasoning text, found different ones in thinking and reasoning",
        ),
        ([{**MESSAGES[1], "reasoning_content": ["a"]}], "messages[0].reasoning_content: expected text, found a list"),
        ([{"role": "tool", "content": "x", "name": 7}], "messages[0].name: expected text, found a number (7)"),
        ([{"role": "tool_call", "content": ""}], "messages[0].content: expected a tool call as JSON, found text"),
        (
            [{"role": "tool_call", "content": "get_weather()"}],
            "messages[0].content: expected a list of tool calls, found text that is not JSON (at character 1",
        ),
    ],
)
def test_the_error_for_a_malformed_message_contains_origin_column_and_value(column: object, message: str) -> None:
    assert_parse_error(parse_messages, "messages", column, message)


def test_the_error_for_a_malformed_sharegpt_message_contains_origin_and_column() -> None:
    column = [{"from": "alien", "value": "x"}]

    assert_parse_error(
        partial(parse_messages, message_format=SHAREGPT),
        "conversations",
        column,
        "conversations[0].from: expected human, gpt, system, observation, tool, user, assistant or function_call",
    )


def test_tool_turns_have_id_and_name() -> None:
    turns = parse_column([{"role": "tool", "content": "grey", "tool_call_id": "1", "name": "get_weather"}])

    assert turns == [Turn(Role.TOOL, "grey", tool_call_id="1", name="get_weather")]


@pytest.mark.parametrize(
    ("message_format", "messages"),
    [
        pytest.param(
            OPENAI,
            [
                {"role": "assistant", "content": "I look."},
                {"role": "tool_call", "content": '{"name": "get_weather", "arguments": {"city": "Bern"}}'},
                {"role": "tool_call", "content": {"name": "get_time", "arguments": "{}"}},
                {"role": "tool_response", "content": "grey"},
            ],
            id="ms-swift",
        ),
        pytest.param(
            SHAREGPT,
            [
                {"from": "gpt", "value": "I look."},
                {
                    "from": "function_call",
                    "value": '[{"name": "get_weather", "arguments": {"city": "Bern"}}, {"name": "get_time"}]',
                },
                {"from": "observation", "value": "grey"},
            ],
            id="ShareGPT",
        ),
    ],
)
def test_messages_with_a_tool_call_continue_the_assistant_turn(
    message_format: MessageFormat, messages: list[dict[str, Any]]
) -> None:
    calls = (ToolCall("get_weather", {"city": "Bern"}, '{"city": "Bern"}'), ToolCall("get_time", {}, "{}"))

    assert parse_column(messages, message_format) == [
        Turn(Role.ASSISTANT, "I look.", tool_calls=calls),
        Turn(Role.TOOL, "grey"),
    ]


def test_tool_calls_after_a_user_turn_are_an_assistant_turn() -> None:
    user, call = parse_column(
        [{"from": "human", "value": "q"}, {"from": "function_call", "value": CALL, "weight": 0.5}], SHAREGPT
    )

    assert (user.role, call.role, call.weight) == (Role.USER, Role.ASSISTANT, 0.5)


def parse_column(column: object, message_format: MessageFormat = OPENAI) -> list[Turn]:
    return parse_messages(Row(ORIGIN, {"messages": column}), "messages", message_format)


def assert_parse_error(parse: Callable[[Row, str], list[Turn]], name: str, column: Any, message: str) -> None:
    with pytest.raises(DatasetError, match=f"^{re.escape(ORIGIN)}.*{re.escape(message)}"):
        parse(Row(ORIGIN, {name: column}), name)
