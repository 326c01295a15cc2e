"""Tests that all column formats are parsed into the same conversation, and the errors for malformed rows."""

import json
import re
from typing import Any

import pytest

from finetune_trainer.data_sources.conversations import Conversation, PromptCompletion, parse_example
from finetune_trainer.data_sources.messages import Role, Turn
from finetune_trainer.data_sources.readers import Row
from finetune_trainer.errors import DatasetError
from testing.builders.conversations import WEATHER_TOOL

ORIGIN = "/data/train.jsonl line 7"
USER_AND_ASSISTANT_TURNS = (Turn(Role.USER, "q"), Turn(Role.ASSISTANT, "a"))
MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def parse_columns(columns: dict[str, Any]) -> Conversation | PromptCompletion:
    return parse_example(Row(ORIGIN, columns))


@pytest.mark.parametrize(
    "columns",
    [
        pytest.param({"messages": MESSAGES}, id="messages"),
        pytest.param({"messages": json.dumps(MESSAGES)}, id="messages as JSON text, as in CSV files"),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, MESSAGES[1]]},
            id="OpenAI content parts",
        ),
        pytest.param(
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, id="ShareGPT"
        ),
        pytest.param({"instruction": "q", "output": "a"}, id="Alpaca"),
        pytest.param({"instruction": "q", "input": "", "output": "a"}, id="Alpaca with empty input"),
        pytest.param({"query": "q", "response": "a"}, id="query and response"),
    ],
)
def test_all_column_formats_are_parsed_into_the_same_conversation(columns: dict[str, Any]) -> None:
    assert parse_columns(columns) == Conversation(ORIGIN, USER_AND_ASSISTANT_TURNS)


@pytest.mark.parametrize(
    "columns",
    [
        pytest.param({"messages": MESSAGES}, id="messages"),
        pytest.param({"messages": [{"role": "system", "content": "s"}, *MESSAGES]}, id="repeated in the messages"),
        pytest.param(
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, id="ShareGPT"
        ),
        pytest.param({"query": "q", "response": "a"}, id="query and response"),
    ],
)
def test_the_system_column_is_the_first_turn(columns: dict[str, Any]) -> None:
    turns = (Turn(Role.SYSTEM, "s"), *USER_AND_ASSISTANT_TURNS)

    assert parse_columns({**columns, "system": "s"}) == Conversation(ORIGIN, turns)


def test_prompt_and_completion_are_parsed_as_plain_text() -> None:
    assert parse_columns({"prompt": "1 + 1 =", "completion": " 2"}) == PromptCompletion(ORIGIN, "1 + 1 =", " 2")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": "x"}, "expected columns messages; conversations; instruction + output"),
        ({"text": "x"}, "found text"),
        ({"messages": [MESSAGES[0]]}, "expected at least one assistant turn"),
        ({"messages": [MESSAGES[0], {"role": "assistant", "content": " "}]}, "turn 1 (assistant) is empty"),
        ({"prompt": "p", "completion": ""}, "column completion: expected text to learn, found none"),
        (
            {"prompt": "p", "completion": "c", "tools": [WEATHER_TOOL]},
            "column tools: a row of plain text is not rendered with a chat template; write the row as messages",
        ),
        (
            {"prompt": "p", "completion": "c", "chat_template_kwargs": {"a": 1}},
            "column chat_template_kwargs: a row of plain text is not rendered with a chat template",
        ),
        (
            {"messages": [{"role": "system", "content": "a"}, *MESSAGES], "system": "b"},
            "expected one system prompt, found different ones in the column system and in the messages",
        ),
    ],
)
def test_the_error_for_a_malformed_row_contains_origin_column_and_value(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(DatasetError, match=f"^{re.escape(ORIGIN)}.*{re.escape(message)}"):
        parse_columns(columns)
