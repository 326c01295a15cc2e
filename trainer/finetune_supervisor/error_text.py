"""Chooses the line of an error text that is displayed, and the reason of the error; the text may have any length."""

from __future__ import annotations

import re
from collections.abc import Iterator

from finetune_supervisor.error_patterns import EXCEPTIONS, PATTERNS

MAX_MESSAGE_CHARACTERS = 600  # of a condensed text
MAX_LINE_CHARACTERS = 300  # of the line that is displayed
_MAX_SEARCHED_CHARACTERS = 2**16  # of the start and of the end of a text; both are searched within seconds
# Expressions with `.*` take quadratic time for the length of a line.
_MAX_SEARCHED_LINE, _OVERLAP = 1000, 200
_WORD, _LETTER_OR_DIGIT = re.compile(r"[^\W\d_]{2}"), re.compile(r"[^\W_]")
_FLAGS = re.IGNORECASE | re.ASCII
_FIRST_PATTERN = ("CudaOutOfMemory", ("CUDA out of memory",))  # has a rule of its own, before those of the patterns


def select_line(text: str) -> str:
    """Return the last line with a word, for a traceback the exception; lines of `^` and `~` have no words."""
    lines = [line.strip() for line in reversed(text.splitlines())]
    return next((line for expression in (_WORD, _LETTER_OR_DIGIT) for line in lines if expression.search(line)), "")


def condense_error(text: str) -> str:
    """Return the first line of a long text and the line to display, in at most MAX_MESSAGE_CHARACTERS."""
    if len(text) <= MAX_MESSAGE_CHARACTERS:
        return text
    shown = select_line(text)[:MAX_LINE_CHARACTERS]
    start = text.lstrip().split("\n", 1)[0][: MAX_MESSAGE_CHARACTERS - len(shown) - 1].strip()
    return shown if shown.startswith(start) else f"{start}\n{shown}"


def find_category(error_type: str, text: str) -> str:
    """Return the reason of the first pattern that matches, as the operator would; empty if none does."""
    searched = "\n".join(_split_long_lines(f"{error_type}: {text}"))
    for reason, expressions in (_FIRST_PATTERN, *PATTERNS.items()):
        for expression in expressions:
            exception = EXCEPTIONS.get(expression)
            if re.search(expression, searched, _FLAGS) and not (exception and re.search(exception, searched, _FLAGS)):
                return reason
    return ""


def _split_long_lines(text: str) -> Iterator[str]:
    """Yield the lines of the start and the end of a text; a long line in overlapping parts."""
    if len(text) > 2 * _MAX_SEARCHED_CHARACTERS:
        text = f"{text[:_MAX_SEARCHED_CHARACTERS]}\n{text[-_MAX_SEARCHED_CHARACTERS:]}"
    for line in text.splitlines():
        for start in range(0, max(len(line) - _OVERLAP, 1), _MAX_SEARCHED_LINE - _OVERLAP):
            yield line[start : start + _MAX_SEARCHED_LINE]
