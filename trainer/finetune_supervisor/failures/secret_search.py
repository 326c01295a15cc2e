"""Finds the parts of short texts that also occur in secrets of any size, each of which is read once (decisions/213)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from finetune_supervisor.failures.decoded_views import list_views, unescape

MIN_WHOLE_BYTES = 6  # of a variable or file, or of a secret that the border of a text cuts
_GRAM_BYTES = 8  # of a line, a value or another part of a secret; shorter ones also occur in normal text
_BORDER_CHARACTERS = 8  # at a border, an encoded character may be incomplete
_SEPARATORS = b"\"'`=:,;\n\r\t (){}[]<>"
# words, paths without digits and the beginning of URLs, which normal text contains too
_COMMON_TEXT = re.compile(rb"(?:[a-z]{2,10}://)?[a-z_.-]*(?:/[a-z_.-]*)*|[A-Za-z_]+|-*[A-Z ]+-*")
_Place = tuple[bytearray, int, int]  # mask of a text, and a range of its characters


def find_secret_characters(texts: Sequence[str], secrets: Sequence[bytes]) -> list[bytearray]:
    """Return for each character of each text whether it belongs to a secret, as 0 or 1."""
    forms = {form for secret in secrets for form in (secret, *unescape(secret))}
    masks = [bytearray(len(text)) for text in texts]
    views = [(mask, view) for text, mask in zip(texts, masks) for view in list_views(text)]  # noqa: B905 (Python 3.9)
    marks = _mark_parts([view.data for _, view in views], forms)
    found: list[_Place] = []
    unclear: dict[tuple[bytes, bytes], list[_Place]] = {}  # by part, and expression for a secret that contains it
    for (mask, view), marked in zip(views, marks):  # noqa: B905
        for start, end, is_marked in _list_parts(marked):
            part = view.data[start:end].strip(_SEPARATORS)
            if is_marked and part and not _COMMON_TEXT.fullmatch(part):
                found.append((mask, *view.find_characters(start, end)))
            elif len(part) >= MIN_WHOLE_BYTES:
                at = view.data.index(part, start)
                first, last = view.find_characters(at, at + len(part))
                at_start, at_end = first < _BORDER_CHARACTERS, last > len(mask) - _BORDER_CHARACTERS
                expression = _build_value_expression(part, is_start_known=not at_start, is_end_known=not at_end)
                unclear.setdefault((part, expression), []).append((mask, first, last))
    for (part, expression), places in unclear.items():
        if any(part in form and re.search(expression, form) for form in forms):
            found += places
    for mask, first, last in found:
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


def _list_parts(marked: bytearray) -> Iterator[tuple[int, int, bool]]:
    """Yield the ranges of marked bytes, and the first and last bytes, which may belong to a secret that was cut."""
    for match in re.finditer(b"\1+", marked):
        yield (*match.span(), True)
    for size in range(MIN_WHOLE_BYTES, min(_GRAM_BYTES, len(marked) + 1)):
        yield from ((0, size, False), (len(marked) - size, len(marked), False))


def _build_value_expression(part: bytes, *, is_start_known: bool, is_end_known: bool) -> bytes:
    """Return an expression for the part as a value in a secret; keys of JSON and words between others are none.

    A side that is not known was cut with the text. If both may be cut, one of them must be that of the value.
    """
    text = re.escape(part)
    start, end = rb"(?<![^\"'`=:\n\t ]" + text + rb")", rb"(?![^\"'`,;\n\r])(?!\" ?:)"
    if not is_start_known and not is_end_known:
        return text + rb"(?:" + start + rb"|" + end + rb")"
    return text + start * is_start_known + end * is_end_known
