"""Escapes texts for report.html, which is also well-formed XML."""

import html
import re

_FORBIDDEN = re.compile("[^\\t\\n\\r\\x20-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")  # in XML, also as an escape


def escape(text: str) -> str:
    """Return the text for an element or an attribute; characters that XML forbids are replaced by U+FFFD."""
    return html.escape(_FORBIDDEN.sub("\ufffd", text))
