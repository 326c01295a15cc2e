"""Truncates texts by their size in JSON, which is the size that the API server and etcd limit."""

import json

_ESCAPED = "<>&\u2028\u2029"  # the API server stores these characters as escape sequences of six bytes
_ESCAPE_BYTES = 6


def measure_json_bytes(text: str) -> int:
    """Return the number of bytes of the text in JSON, encoded as UTF-8 without the quotes."""
    size = len(json.dumps(text, ensure_ascii=False).encode(errors="replace")) - 2
    return size + sum(text.count(character) * (_ESCAPE_BYTES - len(character.encode())) for character in _ESCAPED)


def truncate_text(text: str, max_bytes: int) -> str:
    """Return the longest prefix of the text with at most `max_bytes` bytes in JSON."""
    if len(text) * _ESCAPE_BYTES <= max_bytes:
        return text
    prefix = text[:max_bytes]
    if measure_json_bytes(prefix) <= max_bytes:
        return prefix
    size = 0
    for index, character in enumerate(prefix):
        size += measure_json_bytes(character)
        if size > max_bytes:
            return prefix[:index]
    return prefix


def truncate_text_start(text: str, max_bytes: int) -> str:
    """Return the longest suffix of the text with at most `max_bytes` bytes in JSON."""
    return truncate_text(text[::-1], max_bytes)[::-1]
