"""Tests of the lines that are chosen from error texts of any length."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_api.v1alpha1.reasons import Reason
from finetune_operator.failures.error_patterns import classify_error_text
from finetune_supervisor.error_text import MAX_MESSAGE_CHARACTERS, condense_error, find_category, select_line
from testing.corpus.error_corpus import read_corpus

TORCH_WRAPPER = """Caught OSError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "worker.py", line 349, in _worker_loop
    data = fetcher.fetch(index)  # type: ignore[possibly-undefined]
           ^^^^^^^^^^^^^^^^^^^^
OSError: [Errno 116] Stale file handle: '/data/3.jpg'"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        pytest.param(TORCH_WRAPPER, "OSError: [Errno 116] Stale file handle: '/data/3.jpg'", id="traceback"),
        pytest.param("bad row\n    ~~~~^^^^", "bad row", id="carets at the end"),
        pytest.param("ValueError: x\n  +-------\n  |\n---\n}", "ValueError: x", id="frame of an exception group"),
        pytest.param("'a'\n^^^", "'a'", id="one letter"),
        pytest.param("错误: 没有\n====", "错误: 没有", id="Chinese"),
        pytest.param("^^^^\n----", "", id="no words"),
        pytest.param("", "", id="empty"),
    ],
)
def test_the_last_line_with_words_is_shown(text: str, line: str) -> None:
    assert select_line(text) == line


@given(before=st.integers(0, 20_000), after=st.integers(0, 20_000), width=st.sampled_from((1, 79, 5000)))
def test_patterns_apply_to_the_whole_text(before: int, after: int, width: int) -> None:
    def fill(size: int) -> str:
        return "\n".join(["z " * (width // 2 + 1)] * (size // (width + 1)))

    text = f"{fill(before)}\nCUDA error: uncorrectable ECC error encountered\n{fill(after)}\nCompile with DSA\n  ^^^^"
    condensed = condense_error(text)

    assert find_category("RuntimeError", text) == Reason.GPU_HARDWARE
    assert len(condensed) <= MAX_MESSAGE_CHARACTERS
    assert select_line(condensed) == "Compile with DSA"


def test_a_long_text_has_the_verdict_of_its_short_form() -> None:
    entries = [*read_corpus(held_out=False), *read_corpus(held_out=True)]
    assert len(entries) > 100
    for entry in entries:
        text = f"{'context ' * 20}\n" * 4 + entry.text + "\nframe\n" * 10
        expected = classify_error_text(f"{entry.error_type}: context\n{entry.text}\nframe")
        assert find_category(entry.error_type, text) == (expected or ""), entry.text


def test_huge_texts_are_classified_in_seconds() -> None:
    started_at = time.monotonic()

    find_category("RuntimeError", "timeout reset unreachable " * 100_000)

    assert time.monotonic() - started_at < 60
