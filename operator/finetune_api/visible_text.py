r"""Replaces control characters of foreign text by visible escapes, for terminals and for the status of a job.

These are C0 except tab and newline, DEL, C1, bidirectional controls, line and paragraph separators, halves of
surrogate pairs, and tag characters. The escapes are those of Python, JSON and YAML, such as \x1b and \u202e.
"""

import json
import re
from typing import Any

CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\U000e0000-\U000e007f]"
)
# Sequences that change the colour or weight of text (SGR), except 8, which hides it.
_COLOUR_CODE = r"(?:[34]8;5;\d{1,3}|[34]8;2;\d{1,3};\d{1,3};\d{1,3}|0?[0-79]|[1-9]\d|10[0-7])"
_COLOURS = re.compile(rf"(\x1b\[(?:{_COLOUR_CODE}(?:;{_COLOUR_CODE})*)?m)")
_RESET = "\x1b[0m"


def escape_controls(text: str) -> str:
    r"""Return the text with control characters as escapes such as \x1b; a second call changes nothing."""
    if text.isprintable():  # the usual case, in less than half of the time
        return text
    return CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def escape_log_line(line: str) -> str:
    """Return a line of a log for a terminal: colours pass and end with the line, other control characters do not."""
    parts = _COLOURS.split(line.rstrip("\r"))  # colours have odd indexes
    shown = "".join(part if index % 2 else escape_controls(part) for index, part in enumerate(parts))
    return shown + _RESET if len(parts) > 1 else shown


def render_json(document: Any, *, indent: int) -> str:
    """Return a document as JSON with control characters as escapes, so that parsing returns the same values."""
    text = json.dumps(document, indent=indent, ensure_ascii=False)
    return CONTROLS.sub(lambda match: json.dumps(match[0])[1:-1], text)
