"""Finds the parts of short texts that also occur in secrets of any size, each of which is read once (decisions/213)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache

from finetune_supervisor.failures.decoded_views import list_views, unescape

MIN_WHOLE_BYTES = 6  # of a variable or file, or of a secret that the border of a text cuts
_GRAM_BYTES = 8  # of a line, a value or another part of a secret
# The sides of a value in a secret; keys of JSON are none.
_VALUE_START, _VALUE_END = rb"(?<![^\"'`=:\n\t ])", rb"(?![^\"'`,;\n\r])(?!\" ?:)"


def find_secret_characters(texts: Sequence[str], secrets: Sequence[bytes]) -> list[bytearray]:
    """Return for each character of each text whether it belongs to a secret, as 0 or 1."""
    forms = {form for secret in secrets for form in (secret, *unescape(secret))}
    masks = [bytearray(len(text)) for text in texts]
    views = [(mask, view) for text, mask in zip(texts, masks) for view in list_views(text)]  # noqa: B905 (Python 3.9)
    marks = _mark_parts([view.data for _, view in views], forms)

    @cache  # many views have the same borders
    def occurs(part: bytes, expression: bytes) -> bool:
        return any(part in form and re.search(expression, form) for form in forms)

    for (mask, view), marked in zip(views, marks):  # noqa: B905
        parts = [match.span() for match in re.finditer(b"\1+", marked)]
        parts += [
            (start, end) for start, end, value in _list_cut_values(view.data) if occurs(view.data[start:end], value)
        ]
        for start, end in parts:
            first, last = view.find_characters(start, end)
            mask[first:last] = b"\1" * (last - first)
    return masks


def _mark_parts(texts: Sequence[bytes], secrets: set[bytes]) -> list[bytearray]:
    """Return for each byte of each text whether it belongs to a part of 8 bytes of a secret, or to a short secret."""
    marks, places = [bytearray(len(text)) for text in texts], dict[int, list[tuple[bytearray, int]]]()
    for text, marked in zip(texts, marks):  # noqa: B905
        for offset, grams in enumerate(_list_grams(text)):
            for index, gram in enumerate(grams):
                places.setdefault(gram, []).append((marked, offset + index * _GRAM_BYTES))
    for secret in secrets:
        for grams in _list_grams(secret):
            for gram in filter(places.__contains__, grams):
                for marked, position in places.pop(gram):
                    marked[position : position + _GRAM_BYTES] = b"\1" * _GRAM_BYTES
        for text, marked in zip(texts, marks) if MIN_WHOLE_BYTES <= len(secret) < _GRAM_BYTES else ():  # noqa: B905
            for match in re.finditer(re.escape(secret), text):
                marked[slice(*match.span())] = b"\1" * len(secret)
    return marks


def _list_grams(data: bytes) -> Iterator[memoryview]:
    """Yield the numbers of 8 bytes at all positions of the data, as eight sequences with different offsets."""
    for offset in range(min(_GRAM_BYTES, len(data) - _GRAM_BYTES + 1)):
        yield memoryview(data)[offset : len(data) - (len(data) - offset) % _GRAM_BYTES].cast("Q")


def _list_cut_values(text: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield the ranges of the first and last bytes, and an expression for a value in a secret that is cut there."""
    for size in range(MIN_WHOLE_BYTES, min(_GRAM_BYTES, len(text) + 1)):
        yield 0, size, re.escape(text[:size]) + _VALUE_END
        yield len(text) - size, len(text), _VALUE_START + re.escape(text[-size:])
