"""Tests of pattern sets, including the matching time for adversarial texts."""

import re
import time
from collections.abc import Iterator

import pytest

from finetune_operator.failures import container_start_rules
from finetune_operator.failures.error_patterns import PATTERNS, classify_error_text
from finetune_operator.failures.pattern_set import PatternSet

WORD = re.compile(r"[A-Za-z_]{2,}")


def test_first_expression_that_matches_decides() -> None:
    patterns = PatternSet([("a", "full disk"), ("b", "disk"), ("c", "full")])

    assert patterns.find_first("DISK full") == "b"
    assert patterns.find_first("memory") is None


def test_expression_does_not_match_if_its_exception_matches() -> None:
    patterns = PatternSet([("code", "exec: "), ("host", "exec: runc")], exceptions={"exec: ": "exec: runc"})

    assert [patterns.find_first(text) for text in ("exec: bash", "exec: runc")] == ["code", "host"]


@pytest.mark.parametrize("text", ["\ud800", "\x00", "\n" * 9000, "é" * 9000, ""])
def test_any_text_can_be_classified(text: str) -> None:
    assert classify_error_text(text) is None


def extract_words(expression: str) -> Iterator[str]:
    """Yield each word of the expression, and then all words joined by spaces."""
    words = WORD.findall(expression.replace(r"\b", " ").replace(r"\w", " ").replace(r"\d", " "))
    yield from words
    yield " ".join(words)


def measure_cpu_seconds(text: str) -> float:
    """Return the CPU time of ten classifications, as the minimum of five measurements."""
    durations = []
    for _ in range(5):
        started = time.process_time()
        for _ in range(10):
            classify_error_text(text)
            container_start_rules._PATTERN_SET.find_first(text)
        durations.append(time.process_time() - started)
    return min(durations)


def test_matching_time_grows_linearly_with_the_text() -> None:
    """With backtracking, a text of double length would take four times as long."""
    expressions = [expression for expressions in PATTERNS.values() for expression in expressions]
    expressions += [expression for _, expression in container_start_rules._PATTERNS]
    units = sorted({unit for expression in expressions for unit in extract_words(expression) if unit})
    slow = {}
    for unit in units:
        short_text, long_text = ((unit * size)[:size] for size in (2048, 4096))
        short, long = measure_cpu_seconds(short_text), measure_cpu_seconds(long_text)
        if long > 3 * short + 0.001:  # 1 ms of tolerance for the resolution of the clock
            slow[unit] = (short, long)

    assert len(units) > 300
    assert slow == {}
