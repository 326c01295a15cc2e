"""Tests of parsing termination messages, including those of newer supervisors and invalid text."""

import pytest

from finetune_api.termination import Outcome, Termination, parse_termination
from finetune_api.v1alpha1.status import Progress


def test_unknown_fields_of_a_newer_supervisor_are_ignored_in_nested_objects() -> None:
    text = (
        '{"outcome": "failed", "nodeRank": 2, "new": 1,'
        ' "progress": {"step": 3, "new": 1, "memory": {"peakHighest": 5, "new": 1}}}'
    )

    termination = parse_termination(text)

    assert termination is not None
    assert (termination.outcome, termination.node_rank) == (Outcome.FAILED, 2)
    assert isinstance(termination.progress, Progress)
    assert termination.progress.memory is not None
    assert termination.progress.memory.peak_highest == 5


@pytest.mark.parametrize("text", [None, "", "step 3/4  loss 1.5", '{"outcome": "vanished"}', '{"rank": "x"}', "{"])
def test_invalid_text_is_not_parsed_as_a_termination_message(text: str | None) -> None:
    assert parse_termination(text) is None


def test_missing_fields_have_defaults() -> None:
    assert parse_termination("{}") == Termination()
