"""Match objects with the label selectors of list and watch requests."""

import re
from typing import Any

SET_TERM = re.compile(r"(?P<label>[^ ,]+) in \((?P<values>[^)]*)\)")


def matches_selector(body: dict[str, Any], selector: str) -> bool:
    """Return whether an object matches a selector such as `app,tier=web` or `app in (a,b)`."""
    labels = body["metadata"].get("labels") or {}
    if term := SET_TERM.fullmatch(selector):
        return labels.get(term["label"]) in term["values"].split(",")
    terms = (term.partition("=") for term in selector.split(",") if term)
    return all(labels.get(label) == value if equals else label in labels for label, equals, value in terms)
