"""What becomes of rows that are too long, teach nothing or cannot be used."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_trainer.data.chat_template import Sample
from finetune_trainer.data.row_filter import Counted, Named, Rules, Sieve
from finetune_trainer.errors import ChatTemplateError, DatasetError


def sample(line: int, weights: list[float]) -> Sample:
    return Sample(f"/data/rows.jsonl line {line}", list(range(len(weights))), weights)


SHORT = (sample(1, [0, 1]),)
LONG = (sample(2, [0, 1, 1, 1, 1]),)
LEARNS_AT_ITS_END = (sample(3, [0, 0, 0, 0, 1]),)
SILENT = (sample(4, [0, 0]),)


def test_what_fits_is_kept() -> None:
    sieve = Sieve(Rules(max_length=2))

    assert sieve.keep(SHORT) is SHORT
    assert sieve.counted == Counted(rows=1, kept=1)


def test_too_long_rows_are_dropped_and_named_with_their_length() -> None:
    sieve = Sieve(Rules(max_length=4))

    assert sieve.keep(LONG) is None
    assert sieve.counted == Counted(rows=1, too_long=Named(1, ("/data/rows.jsonl line 2 (5)",)))


def test_a_row_that_is_cut_keeps_its_beginning() -> None:
    sieve = Sieve(Rules(max_length=3, overlong="truncate"))

    (kept,) = sieve.keep(LONG) or ()

    assert (kept.tokens, kept.weights) == ([0, 1, 2], [0, 1, 1])
    assert sieve.counted == Counted(rows=1, kept=1, cut=Named(1, ("/data/rows.jsonl line 2 (5)",)))


def test_a_row_of_which_nothing_to_learn_would_be_left_is_dropped_instead_of_cut() -> None:
    sieve = Sieve(Rules(max_length=4, overlong="truncate"))

    assert sieve.keep(LEARNS_AT_ITS_END) is None
    assert sieve.counted == Counted(rows=1, too_long=Named(1, ("/data/rows.jsonl line 3 (5)",)))


def test_a_pair_is_judged_by_both_of_its_sequences() -> None:
    cutting, dropping = Sieve(Rules(max_length=4, overlong="truncate")), Sieve(Rules(max_length=4))

    assert cutting.keep((*SHORT, *LONG)) == (SHORT[0], Sample(LONG[0].place, [0, 1, 2, 3], [0, 1, 1, 1]))
    assert cutting.keep((*SHORT, *LEARNS_AT_ITS_END)) is None
    assert dropping.keep((*SHORT, *LONG)) is None
    assert dropping.keep((*SHORT, *SILENT)) is None


def test_a_too_long_row_may_be_an_error_with_file_line_and_length() -> None:
    with pytest.raises(DatasetError, match=r"^/data/rows.jsonl line 2: 5 tokens, more than the 4 of spec\.dataset\.m"):
        Sieve(Rules(max_length=4, overlong="error")).keep(LONG)


@pytest.mark.parametrize("error", [DatasetError("line 7: no text"), ChatTemplateError("line 7: refused")], ids=repr)
def test_a_bad_row_is_an_error_or_counted_with_what_is_wrong(error: DatasetError | ChatTemplateError) -> None:
    sieve = Sieve(Rules(on_bad_row="skip"))

    assert sieve.keep(error) is None
    assert sieve.counted == Counted(rows=1, bad=Named(1, (str(error),)))
    with pytest.raises(type(error), match="line 7"):
        Sieve(Rules()).keep(error)


@given(lengths=st.lists(st.integers(1, 9)), overlong=st.sampled_from(["drop", "truncate"]))
def test_every_row_is_kept_or_counted_as_gone(lengths: list[int], overlong: str) -> None:
    sieve = Sieve(Rules(max_length=4, overlong=overlong))  # type: ignore[arg-type]
    rows = [
        (sample(line, [0.0] * (length // 2) + [1.0] * (length - length // 2)),) for line, length in enumerate(lengths)
    ]

    kept = [row for row in map(sieve.keep, rows) if row is not None]

    counted = sieve.counted
    assert (counted.rows, counted.kept) == (len(rows), len(kept))
    assert counted.rows == counted.kept + counted.too_long.count + counted.nothing_to_learn.count
    assert all(len(each.tokens) <= 4 and any(each.weights) for row in kept for each in row)


def test_the_first_ten_are_named_and_the_others_counted() -> None:
    named = Named()
    for number in range(12):
        named = named.plus(f"line {number}")

    assert str(named) == f"{', '.join(f'line {number}' for number in range(10))}, and 2 more"


def test_counts_survive_the_way_through_a_file() -> None:
    counted = Counted(rows=9, kept=3, cut=Named(1, ("a (5)",)), bad=Named(5, ("b", "c")))

    assert Counted.from_json(json.loads(json.dumps(counted.as_json()))) == counted
