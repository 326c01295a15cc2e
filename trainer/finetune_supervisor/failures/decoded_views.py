"""Decoded views of a text, so that a secret is found in any encoding in which the text contains it."""

from __future__ import annotations

import binascii
import codecs
import html
import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

_Encoding = tuple[re.Pattern[bytes], Callable[[re.Match[bytes]], bytes]]


class View(NamedTuple):
    """Decoded bytes, for each the position of the first character that encodes it, and the end of the text."""

    data: bytes
    starts: array[int]

    def find_characters(self, start: int, end: int) -> tuple[int, int]:
        """Return the range of characters that encode a range of bytes, which is not empty."""
        return self.starts[start], self.starts[bisect_right(self.starts, self.starts[end - 1])]


def list_views(text: str) -> Iterator[View]:
    """Yield the text as UTF-8, and the views with nested escapes, base64 and hex decoded."""
    starts = [position for position, character in enumerate(text) for _ in _encode(character)]
    plain = View(_encode(text), array("I", [*starts, len(text)]))
    outer = [plain, *_decode_each([plain], _ESCAPES)]
    nested = _decode_each(outer[1:], _ESCAPES)
    packed = _decode_each([plain], _PACKED)
    yield from (*outer, *nested, *_decode_each(nested, _ESCAPES), *packed)
    yield from (*_decode_each(outer[1:], _PACKED), *_decode_each(packed, _ESCAPES))


def unescape(data: bytes) -> Iterator[bytes]:
    """Yield the values that escapes of JSON, TOML or a URL in the data stand for, if there are any."""
    for pattern, decode in _ESCAPES[:2]:
        decoded = pattern.sub(decode, data)
        if decoded != data:
            yield decoded


def _decode_each(views: Sequence[View], encodings: Iterable[_Encoding]) -> list[View]:
    """Decode each view with each encoding, and return the results that differ."""
    results = {(view := _decode(outer, *encoding)).data: view for outer in views for encoding in encodings}
    return [view for data, view in results.items() if all(data != outer.data for outer in views)]


def _decode(view: View, pattern: re.Pattern[bytes], decode: Callable[[re.Match[bytes]], bytes]) -> View:
    data, starts, position = bytearray(), array("I"), 0
    for match in pattern.finditer(view.data):
        first, last = match.span()
        value = decode(match)
        data += view.data[position:first] + value
        starts += view.starts[position:first] + array("I", [view.starts[first]]) * len(value)
        position = last
    return View(bytes(data + view.data[position:]), starts + view.starts[position:])


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _decode_backslash(match: re.Match[bytes]) -> bytes:
    """Decode an escape of JSON, Python or a shell; \\x and octal numbers stand for bytes."""
    if not match[0][1:2].isalnum():
        return match[0][1:]
    text = codecs.decode(match[0], "unicode_escape")
    if match[0][1:2] not in b"uU":
        return text.encode("latin-1")
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()


def _decode_html(match: re.Match[bytes]) -> bytes:
    return _encode(html.unescape(match[0].decode()))


def _decode_base64(match: re.Match[bytes], skip: int) -> bytes:
    run = match[0][skip:].translate(bytes.maketrans(b"-_", b"+/"))
    return binascii.a2b_base64(run[: len(run) - (len(run) % 4 == 1)] + b"==")


def _decode_hex(match: re.Match[bytes], skip: int) -> bytes:
    return bytes.fromhex(match[0][skip : skip + (len(match[0]) - skip) // 2 * 2].decode())


_BACKSLASH = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U000[0-9a-fA-F]{5}|x[0-9a-fA-F]{2}"
    rb"|[0-3]?[0-7]{1,2}|[abfnrtv]|[^\w\n])"
)
_ESCAPES: tuple[_Encoding, ...] = (
    (_BACKSLASH, _decode_backslash),
    (re.compile(rb"%[0-9A-Fa-f]{2}"), partial(_decode_hex, skip=1)),
    (re.compile(rb"\+"), lambda _: b" "),  # in forms
    (re.compile(rb"&(?:#\d{1,7}|#[xX][0-9A-Fa-f]{1,6}|[A-Za-z]{2,8});"), _decode_html),
    (re.compile(rb"'\"'\"'|'\\''"), lambda _: b"'"),  # a quote in a quoted word of a shell
)
# base64, base64url and hex of a part of a longer value, which is replaced as a whole
_PACKED: tuple[_Encoding, ...] = (
    *((re.compile(rb"[A-Za-z0-9+/_-]{8,}"), partial(_decode_base64, skip=skip)) for skip in range(4)),
    *((re.compile(rb"[0-9A-Fa-f]{12,}"), partial(_decode_hex, skip=skip)) for skip in range(2)),
)
