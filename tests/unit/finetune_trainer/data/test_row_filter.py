"""Tests the handling of rows that are too long, have no target tokens or cannot be used."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_trainer.chat_template.samples import Sample
from finetune_trainer.data.row_filter import RowExamples, RowFilter, RowRules, RowStats
from finetune_trainer.errors import ChatTemplateError, DatasetError


def build_sample(line: int, weights: list[float]) -> Sample:
    return Sample(f"/data/rows.jsonl line {line}", list(range(len(weights))), weights)


FITTING_ROW = (build_sample(1, [0, 1]),)
LONG_ROW = (build_sample(2, [0, 1, 1, 1, 1]),)
ROW_WITH_LAST_TOKEN_AS_TARGET = (build_sample(3, [0, 0, 0, 0, 1]),)
ROW_WITHOUT_TARGETS = (build_sample(4, [0, 0]),)


def test_a_row_within_the_limit_is_kept() -> None:
    row_filter = RowFilter(RowRules(max_length=2))

    assert row_filter.apply(FITTING_ROW) is FITTING_ROW
    assert row_filter.stats == RowStats(rows=1, kept=1)


def test_overlong_rows_are_dropped_and_listed_with_their_lengths() -> None:
    row_filter = RowFilter(RowRules(max_length=4))

    assert row_filter.apply(LONG_ROW) is None
    assert row_filter.stats == RowStats(rows=1, too_long=RowExamples(1, ("/data/rows.jsonl line 2 (5)",)))


def test_a_truncated_row_keeps_its_beginning() -> None:
    row_filter = RowFilter(RowRules(max_length=3, overlong="truncate"))

    (truncated,) = row_filter.apply(LONG_ROW) or ()

    assert (truncated.input_ids, truncated.weights) == ([0, 1, 2], [0, 1, 1])
    assert row_filter.stats == RowStats(rows=1, kept=1, cut=RowExamples(1, ("/data/rows.jsonl line 2 (5)",)))


def test_a_row_without_targets_after_truncation_is_dropped() -> None:
    row_filter = RowFilter(RowRules(max_length=4, overlong="truncate"))

    assert row_filter.apply(ROW_WITH_LAST_TOKEN_AS_TARGET) is None
    assert row_filter.stats == RowStats(rows=1, too_long=RowExamples(1, ("/data/rows.jsonl line 3 (5)",)))


def test_the_row_rules_apply_to_both_sequences_of_a_pair() -> None:
    truncating, dropping = RowFilter(RowRules(max_length=4, overlong="truncate")), RowFilter(RowRules(max_length=4))

    assert truncating.apply((*FITTING_ROW, *LONG_ROW)) == (
        FITTING_ROW[0],
        Sample(LONG_ROW[0].origin, [0, 1, 2, 3], [0, 1, 1, 1]),
    )
    assert truncating.apply((*FITTING_ROW, *ROW_WITH_LAST_TOKEN_AS_TARGET)) is None
    assert dropping.apply((*FITTING_ROW, *LONG_ROW)) is None
    assert dropping.apply((*FITTING_ROW, *ROW_WITHOUT_TARGETS)) is None


def test_the_error_for_an_overlong_row_contains_origin_and_length() -> None:
    with pytest.raises(DatasetError, match=r"^/data/rows.jsonl line 2: 5 tokens, more than the 4 of spec\.dataset\.m"):
        RowFilter(RowRules(max_length=4, overlong="error")).apply(LONG_ROW)


@pytest.mark.parametrize("error", [DatasetError("line 7: no text"), ChatTemplateError("line 7: rejected")], ids=repr)
def test_a_bad_row_raises_its_error_or_is_counted_as_skipped(error: DatasetError | ChatTemplateError) -> None:
    row_filter = RowFilter(RowRules(on_bad_row="skip"))

    assert row_filter.apply(error) is None
    assert row_filter.stats == RowStats(rows=1, bad=RowExamples(1, (str(error),)))
    with pytest.raises(type(error), match="line 7"):
        RowFilter(RowRules()).apply(error)


@given(lengths=st.lists(st.integers(1, 9)), overlong=st.sampled_from(["drop", "truncate"]))
def test_every_row_is_kept_or_counted_as_dropped(lengths: list[int], overlong: str) -> None:
    row_filter = RowFilter(RowRules(max_length=4, overlong=overlong))  # type: ignore[arg-type]
    rows = [
        (build_sample(line, [0.0] * (length // 2) + [1.0] * (length - length // 2)),)
        for line, length in enumerate(lengths)
    ]

    kept = [row for row in map(row_filter.apply, rows) if row is not None]

    stats = row_filter.stats
    assert (stats.rows, stats.kept) == (len(rows), len(kept))
    assert stats.rows == stats.kept + stats.too_long.count + stats.nothing_to_learn.count
    assert all(len(sample.input_ids) <= 4 and any(sample.weights) for row in kept for sample in row)


def test_only_the_first_ten_rows_are_listed_and_the_others_are_counted() -> None:
    examples = RowExamples()
    for number in range(12):
        examples = examples.with_row(f"line {number}")

    assert str(examples) == f"{', '.join(f'line {number}' for number in range(10))}, and 2 more"


def test_row_stats_are_unchanged_after_a_json_round_trip() -> None:
    stats = RowStats(
        rows=9,
        kept=3,
        cut=RowExamples(1, ("a (5)",)),
        bad=RowExamples(5, ("b", "c")),
        notes={"x is ignored": RowExamples(2, ("d", "e"))},
    )

    assert RowStats.from_json(json.loads(json.dumps(stats.as_json()))) == stats


def test_notes_are_counted_once_per_row() -> None:
    row_filter = RowFilter(RowRules())
    for sample in FITTING_ROW * 2:
        noted = replace(sample, notes=("x is ignored",))
        row_filter.apply((noted, noted))

    assert row_filter.stats.notes == {"x is ignored": RowExamples(2, (FITTING_ROW[0].origin,) * 2)}


def test_the_number_of_distinct_notes_is_limited() -> None:
    row_filter = RowFilter(RowRules())
    for number in range(70):
        row_filter.apply((replace(FITTING_ROW[0], notes=(f'message key "{number}" is ignored',)),))

    assert len(row_filter.stats.notes) == 51
    assert row_filter.stats.notes["other message keys are ignored"].count == 20
