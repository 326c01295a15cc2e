"""Replaces characters beyond ASCII by names of letters while the parser reads them.

tree-sitter-bash 0.25.1 crashes on some characters beyond ASCII, such as { before U+10FFFF, because its scanner calls
isalpha and isdigit with them. For the grammar, each of these characters is a letter of a word.
"""

import re

_MARK = "zqU"
_NAME = re.compile(f"{_MARK}([0-9a-f]+)Uqz")


def encode_as_ascii(text: str) -> bytes:
    """Return the text with a name for each character beyond ASCII, and for each occurrence of the mark itself."""
    marked = text.replace(_MARK, f"{_MARK}{ord(_MARK[0]):x}Uqz{_MARK[1:]}")
    return re.sub(r"[^\x00-\x7f]", lambda match: f"{_MARK}{ord(match[0]):x}Uqz", marked).encode("ascii")


def decode_from_ascii(text: bytes) -> str:
    """Return the original text of a part of the encoded text."""
    return _NAME.sub(lambda match: chr(int(match[1], 16)), text.decode("ascii"))
