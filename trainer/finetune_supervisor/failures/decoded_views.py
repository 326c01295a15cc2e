"""Decoded views of a text, so that a secret is found in any encoding in which the text contains it."""

from __future__ import annotations

import binascii
import codecs
import html
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

_Encoding = tuple[re.Pattern[bytes], Callable[[re.Match[bytes]], bytes]]
_SIMPLE_ESCAPES = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"b": b"\b", b"f": b"\f", b"a": b"\a", b"v": b"\v"}


class View(NamedTuple):
    """Decoded bytes, for each the position of the first character that encodes it, and the end of the text."""

    data: bytes
    starts: array[int]


def list_views(text: str, offset: int) -> Iterator[View]:
    """Yield the text as UTF-8, and the views with nested escapes, base64 and hex decoded.

    offset: position of the first character.
    """
    starts = [position for position, character in enumerate(text, offset) for _ in _encode(character)]
    plain = View(_encode(text), array("I", [*starts, offset + len(text)]))
    outer = [plain, *_decode_each([plain], _ESCAPES)]
    nested = _decode_each(outer[1:], _ESCAPES)
    packed = _decode_each([plain], _PACKED)
    yield from (*outer, *nested, *_decode_each(nested, _ESCAPES), *packed)
    yield from (*_decode_each(outer[1:], _PACKED), *_decode_each(packed, _ESCAPES))


def unescape(data: bytes) -> Iterator[bytes]:
    """Yield the values that escapes of JSON, TOML or a URL in the data stand for, if there are any."""
    for pattern, decode in (_ESCAPES[0], _ESCAPES[2]):
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


def _decode_backslash(match: re.Match[bytes], *, in_bytes: bool = False) -> bytes:
    """Decode an escape of JSON, Python or a shell; \\x stands for a byte in the repr of bytes, or for a character."""
    escape, kind = match[0], match[0][1:2]
    if kind in (b"u", b"U", b"x") and len(escape) > 2:
        if kind == b"x" and in_bytes:
            return bytes.fromhex(escape[2:].decode())
        text = codecs.decode(escape, "unicode_escape")
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()
    if b"0" <= kind <= b"7":
        return bytes([int(escape[1:], 8) & 0xFF])
    return _SIMPLE_ESCAPES.get(kind, kind)


def _unescape_html(escape: bytes) -> bytes:
    return _encode(html.unescape(escape.decode()))


def _decode_base64(match: re.Match[bytes], skip: int) -> bytes:
    run = match[0][skip:]
    run = run[: len(run) - (len(run) % 4 == 1)].translate(bytes.maketrans(b"-_", b"+/"))
    return binascii.a2b_base64(run + b"=" * (-len(run) % 4))


def _decode_hex(match: re.Match[bytes], skip: int) -> bytes:
    return bytes.fromhex(match[0][skip : skip + (len(match[0]) - skip) // 2 * 2].decode())


_BACKSLASH = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U000[0-9a-fA-F]{5}|x[0-9a-fA-F]{2}"
    rb"|[0-7]{1,3}|[^\n])"
)
_ESCAPES: tuple[_Encoding, ...] = (
    (_BACKSLASH, _decode_backslash),
    (_BACKSLASH, partial(_decode_backslash, in_bytes=True)),
    (re.compile(rb"%[0-9A-Fa-f]{2}"), partial(_decode_hex, skip=1)),
    (re.compile(rb"\+"), lambda _: b" "),  # in forms
    (re.compile(rb"&(?:#\d{1,7}|#[xX][0-9A-Fa-f]{1,6}|[A-Za-z]{2,8});"), lambda match: _unescape_html(match[0])),
    (re.compile(rb"'\"'\"'|'\\''"), lambda _: b"'"),  # a quote in a quoted word of a shell
    # line breaks that most tools insert into base64
    (re.compile(rb"(?<=[A-Za-z0-9+/]{60})(?:\r?\n|\\n)(?=[A-Za-z0-9+/])"), lambda _: b""),
)
# base64, base64url and hex of a part of a longer value, which is replaced as a whole
_PACKED: tuple[_Encoding, ...] = (
    *((re.compile(rb"[A-Za-z0-9+/_-]{8,}"), partial(_decode_base64, skip=skip)) for skip in range(4)),
    *((re.compile(rb"[0-9A-Fa-f]{12,}"), partial(_decode_hex, skip=skip)) for skip in range(2)),
)
