"""Match objects with equality-based label selectors of list and watch requests."""

from typing import Any


def matches_selector(body: dict[str, Any], selector: str) -> bool:
    """Return whether an object matches a selector such as `app,tier=web`."""
    labels = body["metadata"].get("labels") or {}
    terms = (term.partition("=") for term in selector.split(",") if term)
    return all(labels.get(label) == value if equals else label in labels for label, equals, value in terms)
