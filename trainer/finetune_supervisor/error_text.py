"""Chooses the lines of an error text that are displayed and that decide the verdict; it may have any length."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from finetune_supervisor.error_patterns import EXCEPTIONS, PATTERNS

MAX_MESSAGE_CHARACTERS = 600  # of a condensed text
MAX_LINE_CHARACTERS = 300  # of the line that is displayed
_MAX_MESSAGE_BYTES = 700  # of a text in JSON that is kept unchanged; the status has at most 800 for it
_MAX_DECISIVE_CHARACTERS = 200
_MAX_SEARCHED_CHARACTERS = 2**16  # of the start and of the end of a text; both are searched within seconds
# Expressions with `.*` take quadratic time for the length of a line.
_MAX_SEARCHED_LINE, _OVERLAP = 1000, 200
_WORD, _LETTER_OR_DIGIT = re.compile(r"[^\W\d_]{2}"), re.compile(r"[^\W_]")
_FLAGS = re.IGNORECASE | re.ASCII
_CUDA_OUT_OF_MEMORY = "CUDA out of memory"  # the operator looks for it before it matches the patterns


def select_line(text: str) -> str:
    """Return the last line with a word, for a traceback the exception; lines of `^` and `~` have no words."""
    lines = [line.strip() for line in reversed(text.splitlines())]
    return next((line for expression in (_WORD, _LETTER_OR_DIGIT) for line in lines if expression.search(line)), "")


def condense_error(error_type: str, text: str) -> str:
    """Return a text of at most MAX_MESSAGE_CHARACTERS that has the same verdict, and ends with the line to display."""
    in_json = json.dumps(text, ensure_ascii=False).encode("utf-8", "replace")
    if len(text) <= MAX_MESSAGE_CHARACTERS and len(in_json) <= _MAX_MESSAGE_BYTES:
        return text
    decisive = [part.removeprefix(f"{error_type}: ") for part in _find_decisive_parts(f"{error_type}: {text}")]
    size = MAX_MESSAGE_CHARACTERS - sum(len(part) + 1 for part in decisive)
    shown = select_line(text)[: min(MAX_LINE_CHARACTERS, size)]
    start = text.lstrip().split("\n", 1)[0][: max(size - len(shown) - 1, 0)].strip()
    return "\n".join(dict.fromkeys(filter(None, (*decisive, start, shown))))


def find_category(error_type: str, text: str) -> str:
    """Return the reason of the first pattern that matches, as the operator would; empty if none does."""
    found = _search_patterns(f"{error_type}: {text}", PATTERNS)
    return next((reason for reason, _, is_excluded in found if not is_excluded), "")


def _find_decisive_parts(text: str) -> Iterator[str]:
    """Yield the text that the first pattern matches, and before it the texts that exclude other patterns."""
    for _, match, is_excluded in _search_patterns(text, (("", (_CUDA_OUT_OF_MEMORY,)), *PATTERNS)):
        yield _shorten(match)
        if not is_excluded:
            return


def _search_patterns(
    text: str, patterns: Sequence[tuple[str, Sequence[str]]]
) -> Iterator[tuple[str, re.Match[str], bool]]:
    """Yield the reason and match of each pattern, or the match that excludes it, and whether it is excluded."""
    searched = "\n".join(_split_long_lines(text))
    for reason, expressions in patterns:
        for expression in expressions:
            if (match := re.search(expression, searched, _FLAGS)) is None:
                continue
            exception = re.search(EXCEPTIONS[expression], searched, _FLAGS) if expression in EXCEPTIONS else None
            yield reason, exception or match, exception is not None


def _split_long_lines(text: str) -> Iterator[str]:
    """Yield the lines of the start and the end of a text; a long line in overlapping parts."""
    if len(text) > 2 * _MAX_SEARCHED_CHARACTERS:
        text = f"{text[:_MAX_SEARCHED_CHARACTERS]}\n{text[-_MAX_SEARCHED_CHARACTERS:]}"
    for line in text.splitlines():
        for start in range(0, max(len(line) - _OVERLAP, 1), _MAX_SEARCHED_LINE - _OVERLAP):
            yield line[start : start + _MAX_SEARCHED_LINE]


def _shorten(match: re.Match[str]) -> str:
    """Return the match with the rest of its line, but without the middle of a long match."""
    if len(match[0]) > _MAX_DECISIVE_CHARACTERS:
        half = _MAX_DECISIVE_CHARACTERS // 2 - 3
        return f"{match[0][:half]} ... {match[0][-half:]}"
    return match.string[match.start() :].split("\n", 1)[0][:_MAX_DECISIVE_CHARACTERS]
