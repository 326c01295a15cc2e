"""Tests the errors for malformed columns of messages."""

from collections.abc import Callable
from typing import Any

import pytest

from finetune_trainer.data_sources.messages import Turn, parse_messages, parse_sharegpt_messages
from finetune_trainer.data_sources.readers import Row
from finetune_trainer.errors import DatasetError

ORIGIN = "/data/train.jsonl line 7"
MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ([], "column messages: expected a list of turns, found a list ([])"),
        ("no list", "column messages: expected a list of turns, found text that is not JSON"),
        ([7], "column messages[0]: expected an object, found a number (7)"),
        (
            [{"role": "bot", "content": "x"}],
            'messages[0].role: expected system, user or assistant, found text ("bot")',
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
    ],
)
def test_the_error_for_a_malformed_message_contains_origin_column_and_value(column: object, message: str) -> None:
    assert_parse_error(parse_messages, "messages", column, message)


def test_the_error_for_a_malformed_sharegpt_message_contains_origin_and_column() -> None:
    column = [{"from": "alien", "value": "x"}]

    assert_parse_error(
        parse_sharegpt_messages, "conversations", column, "conversations[0].from: expected human, gpt or system"
    )


def assert_parse_error(parse_column: Callable[[Row, str], list[Turn]], name: str, column: Any, message: str) -> None:
    with pytest.raises(DatasetError) as raised:
        parse_column(Row(ORIGIN, {name: column}), name)

    assert str(raised.value).startswith(ORIGIN)
    assert message in str(raised.value)
