"""Tests finding and reading column formats, and the errors for malformed columns."""

import re
from typing import Any

import pytest

from finetune_trainer.data_sources.column_formats import (
    DPO_FORMATS,
    SFT_FORMATS,
    ColumnFormat,
    RowText,
    RowTurns,
    find_format,
)
from finetune_trainer.data_sources.messages import Role, Turn
from finetune_trainer.data_sources.readers import Row
from finetune_trainer.errors import DatasetError

ORIGIN = "/data/train.jsonl line 7"


def read_columns(columns: dict[str, Any]) -> RowTurns | RowText:
    row = Row(ORIGIN, columns)
    column_format = find_format(row, SFT_FORMATS)
    assert column_format is not None
    return column_format.read(row)


@pytest.mark.parametrize(
    ("formats", "column_format"),
    [
        pytest.param(
            formats,
            column_format,
            id=f"{method}: {' + '.join(column_format.columns)}{' of lists' if column_format.requires_lists else ''}",
        )
        for method, formats in (("sft", SFT_FORMATS), ("dpo", DPO_FORMATS))
        for column_format in formats
    ],
)
def test_each_format_matches_a_row_with_its_columns(
    formats: tuple[ColumnFormat, ...], column_format: ColumnFormat
) -> None:
    columns: dict[str, object] = dict.fromkeys(column_format.columns, [] if column_format.requires_lists else "")

    assert find_format(Row(ORIGIN, columns), formats) is column_format


def test_sft_formats_have_one_completion_and_dpo_formats_have_two() -> None:
    assert {len(column_format.completion_columns) for column_format in SFT_FORMATS} == {1}
    assert {len(column_format.completion_columns) for column_format in DPO_FORMATS} == {2}


def test_find_format_returns_the_first_matching_format() -> None:
    row = Row(ORIGIN, {"query": "q", "response": "a", "messages": []})

    assert find_format(row, SFT_FORMATS) is SFT_FORMATS[0]


def test_the_alpaca_input_follows_the_instruction() -> None:
    content = read_columns({"instruction": "translate", "input": "Haus", "output": "house"})

    assert content == RowTurns([Turn(Role.USER, "translate\nHaus")], ([Turn(Role.ASSISTANT, "house")],))


def test_system_prompt_and_history_come_before_the_query() -> None:
    content = read_columns({"system": "s", "history": [["q0", "a0"]], "query": "q", "response": "a"})

    assert isinstance(content, RowTurns)
    (turns,) = content.conversations
    assert [turn.content for turn in turns] == ["s", "q0", "a0", "q", "a"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"instruction": 3, "output": "a"}, "column instruction: expected text, found a number (3)"),
        ({"history": [["q"]], "query": "q", "response": "a"}, "history[0]: expected a list of query and response"),
    ],
)
def test_the_error_for_a_malformed_prompt_contains_origin_column_and_value(
    columns: dict[str, Any], message: str
) -> None:
    with pytest.raises(DatasetError, match=f"^{re.escape(ORIGIN)}.*{re.escape(message)}"):
        read_columns(columns)
