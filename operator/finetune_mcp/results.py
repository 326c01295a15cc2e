"""Builds the texts of tools within bounds: results that are marked as untrusted, and previews of changes."""

import json
import re
from collections.abc import Iterator
from itertools import accumulate, takewhile
from typing import Any

from finetune_api.bounded_text import measure_json_bytes, truncate_text, truncate_text_start
from finetune_api.visible_text import escape_controls
from finetune_client.errors import ClientError

MAX_VALUE_BYTES = 19_000  # as indented JSON, in a result of at most 20,000
MAX_PREVIEW_BYTES = 18_000  # as JSON
_PLAIN_KEY = re.compile(r"[\w/-]+", re.ASCII)

Json = dict[str, Any]


def mark_untrusted(value: Any, *, keeps_end: bool = False) -> Json:
    """Return a JSON value as the field `untrusted` of a result, with control characters as escapes.

    Of a long list, the first items are kept, otherwise the first part of its JSON; the field `truncated` reports it.
    keeps_end: the last items or characters are kept instead.
    """
    value = _escape(value)
    if _measure(value) <= MAX_VALUE_BYTES:
        return {"untrusted": value}
    which = "last" if keeps_end else "first"
    if isinstance(value, list) and (items := _select_items(value[::-1] if keeps_end else value)):
        report = f"only the {which} {len(items)} of {len(value)} items"
        return {"untrusted": items[::-1] if keeps_end else items, "truncated": report}
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    part = (truncate_text_start if keeps_end else truncate_text)(text, MAX_VALUE_BYTES)
    return {"untrusted": part, "truncated": f"only the {which} {len(part)} of {len(text)} characters"}


def _select_items(items: list[Any]) -> list[Any]:
    """Return as many of the first items as fit."""
    sizes = accumulate(_measure([item]) for item in items)
    return [item for item, _ in takewhile(lambda each: each[1] <= MAX_VALUE_BYTES, zip(items, sizes, strict=True))]


def _measure(value: Any) -> int:
    """Return the size of a value as the indented JSON that a client receives."""
    return len(json.dumps({"untrusted": value}, indent=2, ensure_ascii=False).encode())


def _escape(value: Any) -> Any:
    """Return a JSON value with the control characters of all texts as escapes."""
    if isinstance(value, dict):
        return {escape_controls(str(key)): _escape(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escape(item) for item in value]
    return escape_controls(value) if isinstance(value, str) else value


def describe_changes(old_spec: Json, new_spec: Json) -> str:
    """Return one line per field of the spec that changes; old_spec is {} for a new job.

    Raises:
        ClientError: The fields do not fit into a preview, so that some could not be confirmed.
    """
    old, new = (dict(_flatten("spec", spec)) if spec else {} for spec in (old_spec, new_spec))
    changed = sorted(path for path in {**old, **new} if old.get(path) != new.get(path))
    text = "\n".join(
        f"{path}: {_quote(old.get(path))} -> {_quote(new.get(path))}" if old_spec else f"{path}: {_quote(new[path])}"
        for path in changed
    )
    if measure_json_bytes(text) > MAX_PREVIEW_BYTES:
        problem = f"the {len(changed)} fields that change exceed the {MAX_PREVIEW_BYTES} bytes of a preview"
        raise ClientError(f"{problem}; submit the manifest by the command line")
    return text or "no field of the spec changes"


def _flatten(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield path and value of each field; a list of texts or numbers is one field."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flatten(f"{path}.{key if _PLAIN_KEY.fullmatch(key) else _quote(key)}", item)
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for index, item in enumerate(value):
            yield from _flatten(f"{path}[{index}]", item)
    else:
        yield path, value


def _quote(value: Any) -> str:
    """Return a value as JSON in one line, in which it cannot look like another field."""
    return "not set" if value is None else escape_controls(json.dumps(value, ensure_ascii=False))
