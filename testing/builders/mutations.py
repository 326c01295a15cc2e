"""Random changes of JSON objects: missing, empty, extreme and unexpected values at any path."""

import copy
import json
import random
import re
from collections.abc import Iterator
from typing import Any

TIMES = (
    "0001-01-01T00:00:00Z",
    "1969-12-31T23:59:59Z",
    "2026-01-01T12:00:00Z",
    "2026-01-01T12:00:00.123456Z",
    "2026-01-01T12:00:00+14:00",
    "9999-12-31T23:59:59Z",
    "9999-12-31T23:59:59-12:00",
)
TEXTS = (
    "",
    " ",
    "\x00",
    "NaN",
    "-1",
    "x" * 5000,
    "out of memory " * 300,
    "../..",
    "\u202e\u4e2d\u6587" * 300,
    "a\nb",
)
NUMBERS = (0, -1, 1, 137, 255, 2**31 - 1, -(2**31), 2**53, 2**63 - 1, 10**30, 0.5, 1e308, -1e308)
TIME_PREFIX = re.compile(r"\d{4}-\d\d-")
OTHER_VALUES: tuple[Any, ...] = (None, True, False, [], {}, [[]], {"a": {"b": [None]}}, *TIMES, *TEXTS, *NUMBERS)

Path = tuple[str | int, ...]


def list_paths(value: object, path: Path = ()) -> Iterator[Path]:
    """Yield the path of every value below an object or list."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield (*path, key)
        yield from list_paths(child, (*path, key))


def mutate(body: dict[str, Any], source: random.Random, *, count: int, keep_types: bool) -> dict[str, Any]:
    """Return a copy of the object with up to `count` changed values.

    keep_types: replace a value only by one of the same JSON type, as the API server guarantees for pods.
    """
    mutated = copy.deepcopy(body)
    for _ in range(count):
        path = source.choice(list(list_paths(mutated)) or [()])
        if path:
            _change(mutated, path, source, keep_types=keep_types)
    return mutated


def _change(body: dict[str, Any], path: Path, source: random.Random, *, keep_types: bool) -> None:
    parent: Any = body
    for key in path[:-1]:
        parent = parent[key]
    action = source.randrange(4)
    if action == 0:
        del parent[path[-1]]
    elif action == 1 and isinstance(parent, dict):
        added_name = source.choice(("unknown", "reason", "message", *(() if keep_types else ("state",))))
        parent[added_name] = "" if keep_types else source.choice(TEXTS)
    else:
        parent[path[-1]] = _choose_value(parent[path[-1]], source, keep_types=keep_types)


def _choose_value(value: object, source: random.Random, *, keep_types: bool) -> object:
    if not keep_types:
        return copy.deepcopy(source.choice(OTHER_VALUES))
    if isinstance(value, bool) or value is None:
        return source.choice((True, False, None)) if isinstance(value, bool) else None
    if isinstance(value, int):
        return source.choice([number for number in NUMBERS if isinstance(number, int) and abs(number) < 2**31])
    if isinstance(value, str):
        # the API server accepts only valid timestamps where it expects one
        return source.choice(TIMES if TIME_PREFIX.match(value) else TEXTS)
    return type(value)() if source.random() < 0.5 else value


def mutate_text(text: str, source: random.Random, *, count: int) -> str:
    """Return JSON text with changed values, or with characters that are deleted, repeated or replaced."""
    if source.random() < 0.7:
        return json.dumps(mutate(json.loads(text), source, count=count, keep_types=False))
    for _ in range(count):
        start = source.randrange(len(text) + 1)
        end = min(len(text), start + source.choice((1, 2, 50)))
        text = (
            text[:start]
            + source.choice(("", text[start:end] * 3, '"', "{", "[" * 50, "\\u0000", "\\ud800", "9" * 400))
            + text[end:]
        )
    return text
