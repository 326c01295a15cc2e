"""Tests which unknown keys and columns are errors, and which are counted as ignored."""

from typing import Any

import pytest

from finetune_trainer.data_sources.conversations import Conversation, parse_example
from finetune_trainer.data_sources.readers import Row
from finetune_trainer.errors import DatasetError

ORIGIN = "/data/train.jsonl line 7"
USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def parse_columns(**columns: Any) -> Conversation:
    example = parse_example(Row(ORIGIN, columns))
    assert isinstance(example, Conversation)
    return example


def test_unknown_keys_with_a_value_are_noted() -> None:
    messages = [{**USER, "id": 1, "name": "Ann"}, {**ASSISTANT, "id": 2, "name": None, "tags": []}]

    assert parse_columns(messages=messages).notes == ('message key "id" is ignored', 'message key "name" is ignored')


def test_unknown_columns_are_allowed() -> None:
    assert parse_columns(messages=[USER, ASSISTANT], source="web", score=3).notes == ()


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_a_column_with_reasoning_is_noted(name: str) -> None:
    notes = parse_columns(messages=[USER, ASSISTANT], **{name: "hm"}).notes

    assert notes == (f'column "{name}" beside the messages is ignored',)


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("function_call", "write it as tool_calls"),
        ("tools", "write it into the column tools of the row"),
        ("chat_template_kwargs", "write it into the column chat_template_kwargs of the row"),
        ("refusal", "write it as content"),
        ("train", "write it as weight, from 0 to 1"),
        ("loss", "write it as weight, from 0 to 1"),
        ("reasoning_details", "write it as reasoning_content"),
        ("images", "write it as a content part, or into a column of the row"),
        ("audio", "audio is not supported; remove it"),
    ],
)
def test_a_key_that_changes_the_training_elsewhere_is_an_error(key: str, remedy: str) -> None:
    with pytest.raises(DatasetError) as raised:
        parse_columns(messages=[USER, {**ASSISTANT, key: False}])

    assert str(raised.value) == f"{ORIGIN}, column messages[1].{key}: is not supported; {remedy}"


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("functions", "write it as tools"),
        ("tool_calls", "write it as tool_calls of a message"),
        ("function_call", "write it as tool_calls of a message"),
        ("audios", "audio is not supported; remove it"),
    ],
)
def test_a_column_that_changes_the_training_elsewhere_is_an_error(name: str, remedy: str) -> None:
    with pytest.raises(DatasetError) as raised:
        parse_columns(messages=[USER, ASSISTANT], **{name: ["x"]})

    assert str(raised.value) == f"{ORIGIN}, column {name}: is not supported; {remedy}"
