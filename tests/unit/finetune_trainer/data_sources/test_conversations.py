"""Tests that every column format is parsed into the same conversation, and the errors for malformed rows."""

import json
from typing import Any

import pytest

from finetune_trainer.data_sources.conversations import Conversation, PromptCompletion, Role, Turn, parse_example
from finetune_trainer.data_sources.readers import Row
from finetune_trainer.errors import DatasetError

ORIGIN = "/data/train.jsonl line 7"
USER_AND_ASSISTANT_TURN = (Turn(Role.USER, "q"), Turn(Role.ASSISTANT, "a"))
MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def parse(columns: dict[str, Any]) -> Conversation | PromptCompletion:
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
def test_all_column_formats_give_the_same_conversation(columns: dict[str, Any]) -> None:
    assert parse(columns) == Conversation(ORIGIN, USER_AND_ASSISTANT_TURN)


def test_the_input_of_alpaca_rows_follows_the_instruction() -> None:
    example = parse({"instruction": "translate", "input": "Haus", "output": "house"})

    assert isinstance(example, Conversation)
    assert example.turns[0] == Turn(Role.USER, "translate\nHaus")


def test_system_prompt_and_history_come_before_the_query() -> None:
    example = parse({"system": "s", "history": [["q0", "a0"]], "query": "q", "response": "a"})

    assert isinstance(example, Conversation)
    assert [turn.content for turn in example.turns] == ["s", "q0", "a0", "q", "a"]


def test_prompt_and_completion_remain_plain_text() -> None:
    assert parse({"prompt": "1 + 1 =", "completion": " 2"}) == PromptCompletion(ORIGIN, "1 + 1 =", " 2")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": "x"}, "expected columns messages; conversations; instruction + output"),
        ({"text": "x"}, "found text"),
        ({"messages": []}, "column messages: expected a list of turns, found a list ([])"),
        ({"messages": "no list"}, "column messages: expected a list of turns, found text that is not JSON"),
        ({"messages": [7]}, "column messages[0]: expected an object, found a number (7)"),
        (
            {"messages": [{"role": "bot", "content": "x"}]},
            'messages[0].role: expected system, user or assistant, found text ("bot")',
        ),
        (
            {"messages": [MESSAGES[0], {"role": "assistant", "content": None}]},
            "messages[1].content: expected text, found nothing",
        ),
        ({"messages": [MESSAGES[0]]}, "expected at least one assistant turn"),
        ({"messages": [MESSAGES[0], {"role": "assistant", "content": " "}]}, "turn 1 (assistant) is empty"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "content[0]: expected the image here (image, path or image_url) or in a column images",
        ),
        (
            {"messages": [MESSAGES[0], {**MESSAGES[1], "weight": 2}]},
            "messages[1].weight: expected a number from 0 to 1, found a number (2)",
        ),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "conversations[0].from: expected human, gpt or system"),
        ({"instruction": 3, "output": "a"}, "column instruction: expected text, found a number (3)"),
        ({"prompt": "p", "completion": ""}, "column completion: expected text to learn, found none"),
        ({"history": [["q"]], "query": "q", "response": "a"}, "history[0]: expected a list of query and response"),
    ],
)
def test_the_error_for_a_malformed_row_has_origin_column_and_value(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(DatasetError) as raised:
        parse(columns)

    assert str(raised.value).startswith(ORIGIN)
    assert message in str(raised.value)
