"""Finds the parts of short texts that also occur in secrets of any size, each of which is read once (decisions/213)."""

from __future__ import annotations

import re
import sys
from array import array
from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate

from finetune_supervisor.failures.decoded_views import list_views, unescape

MIN_WHOLE_LENGTH = 6  # bytes of a variable or file, or of a secret that the border of a text cuts
_MIN_PART_LENGTH = 8  # bytes of a line, a value or another part of a secret; shorter ones also occur in normal text
_GRAM_BYTES, _STRIDE = 4, 2  # each part of a secret with at least 5 bytes contains 4 bytes at an even position
_BORDER_CHARACTERS = 8  # at a border, an encoded character may be incomplete
_MAX_STEPS = 10_000_000  # about ten seconds
_SEPARATORS = b"\"'`=:,;\n\r\t (){}[]<>"
# words, paths without digits and the beginning of URLs, which normal text contains too
_COMMON_TEXT = re.compile(rb"(?:[a-z]{2,10}://)?[a-z_.-]*(?:/[a-z_.-]*)*|[A-Za-z_]+|-*[A-Z ]+-*")


class TooMuchWorkError(Exception):
    """The texts resemble the secrets in so many places that the search would take minutes."""


def find_secret_characters(texts: Sequence[str], secrets: Sequence[bytes]) -> list[bytearray]:
    """Return for each character of each text whether it belongs to a secret, as 0 or 1. Raises: TooMuchWorkError."""
    if any(not secret for secret in secrets):  # redact.UNREAD
        raise TooMuchWorkError
    search = _Search(texts)
    # longest first, because a found part is not extended by a shorter secret
    for secret in sorted(secrets, key=len, reverse=True):
        for form in (secret, *unescape(secret)):
            search.hide(form)
    return [search.hidden[start:end] for start, end in zip(search.borders, search.borders[1:])]  # noqa: B905


class _Search:
    """Index of the parts of 4 bytes in all views of the texts, and the characters that belong to a secret."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.borders = [0, *accumulate(map(len, texts))]
        self.hidden = bytearray(self.borders[-1])
        self._starts = array("I")  # for each byte of the buffer, the first character that encodes it
        self._view_starts = [0]  # positions in the buffer
        self._positions: dict[int, list[int]] = {}
        self._steps = 0
        buffer = bytearray()
        for text, offset in zip(texts, self.borders):  # noqa: B905
            for view in list_views(text, offset) if text else ():
                for position in range(len(view.data) - _GRAM_BYTES + 1):
                    gram = int.from_bytes(view.data[position : position + _GRAM_BYTES], sys.byteorder)
                    self._positions.setdefault(gram, []).append(len(buffer) + position)
                buffer += view.data + b"\n"
                self._starts += view.starts
                self._view_starts.append(len(buffer))
        self._buffer, self._covered = bytes(buffer), bytearray(len(buffer))

    def hide(self, secret: bytes) -> None:
        """Mark all characters that encode a part of the secret."""
        if len(secret) < MIN_WHOLE_LENGTH:
            return
        for offset in range(0, _GRAM_BYTES, _STRIDE):
            grams = memoryview(secret)[offset : len(secret) - (len(secret) - offset) % _GRAM_BYTES].cast("I")
            for index, gram in enumerate(grams):
                if gram in self._positions:
                    self._hide_at(secret, offset + index * _GRAM_BYTES, gram)

    def _hide_at(self, secret: bytes, at: int, gram: int) -> None:
        buffer, covered, spots = self._buffer, self._covered, self._positions[gram]
        self._steps += len(spots)
        spots = self._positions[gram] = [spot for spot in spots if not (covered[spot] and covered[spot + 3])]
        for spot in spots:
            view, shift = bisect(self._view_starts, spot), spot - at
            first_start, last_end = self._view_starts[view - 1] - shift, self._view_starts[view] - 1 - shift
            start, end = at, at + _GRAM_BYTES
            while start > max(first_start, 0) and secret[start - 1] == buffer[start - 1 + shift]:
                start -= 1
            while end < min(last_end, len(secret)) and secret[end] == buffer[end + shift]:
                end += 1
            self._steps += end - start
            if self._is_secret(secret, start, end, shift):
                covered[start + shift : end + shift] = b"\1" * (end - start)
                first, last = self._find_characters(start + shift, end + shift)
                self.hidden[first:last] = b"\1" * (last - first)
        if self._steps > _MAX_STEPS:
            raise TooMuchWorkError

    def _find_characters(self, start: int, end: int) -> tuple[int, int]:
        """Return the range of characters that encode a range of bytes in the buffer."""
        last = end
        while self._starts[last] == self._starts[end - 1]:
            last += 1
        return self._starts[start], self._starts[last]

    def _is_secret(self, secret: bytes, start: int, end: int, shift: int) -> bool:
        """Return whether this part of the secret, which a text contains, is more than normal text."""
        if end - start == len(secret):
            return True
        part = secret[start:end]
        text = part.strip(_SEPARATORS)
        if len(part) < MIN_WHOLE_LENGTH or not text:
            return False
        begins, ends, is_whole = _find_value_borders(secret, start + part.find(text), len(text))
        # A text may have been cut within a secret.
        first, last = self._find_characters(start + shift, end + shift)
        number = bisect(self.borders, first)
        is_at_start = first < self.borders[number - 1] + _BORDER_CHARACTERS
        if (is_at_start and ends) or (last > self.borders[number] - _BORDER_CHARACTERS and begins):
            return True
        return len(part) >= _MIN_PART_LENGTH and (is_whole or _COMMON_TEXT.fullmatch(text) is None)


def _find_value_borders(secret: bytes, start: int, length: int) -> tuple[bool, bool, bool]:
    """Return whether a value or word of the secret begins there, whether it ends there, and whether it is a value.

    A word between two spaces is no value, and neither is a key of JSON.
    """
    before, after = secret[max(start - 2, 0) : start], secret[start + length : start + length + 2]
    begins_value = before[-1:] in (b"", b'"', b"'", b"`", b"=", b":", b"\n", b"\t") or before in (b": ", b"= ")
    begins = begins_value or before[-1:] == b" "
    ends = after[:1] in (b"", b'"', b"'", b"`", b",", b";", b"\n", b"\r") and after != b'":'
    return begins, ends, (begins and ends) or (begins_value and after[:1] == b" ")
