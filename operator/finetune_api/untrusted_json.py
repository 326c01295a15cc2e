"""Parses JSON written by untrusted user code: termination messages and responses of /status."""

import json
import math
from datetime import UTC, datetime
from typing import Any, TypeVar

from pydantic import TypeAdapter

MAX_INTEGER = 2**53 - 1  # the API server rejects larger integers
MAX_FLOAT = 1e30
MAX_TEXT_CHARACTERS = 4096
LATEST_TIME = datetime(2100, 1, 1, tzinfo=UTC)
T = TypeVar("T")


def parse_untrusted_json(adapter: TypeAdapter[T], content: str | bytes) -> T | None:
    """Parse a JSON object and validate it in strict mode.

    NaN, infinity and out-of-range numbers are dropped; long strings are truncated. Returns None if the content is
    invalid JSON, is nested too deeply, or fails validation.
    """
    try:
        value = json.loads(content, parse_int=_parse_int)
        if not isinstance(value, dict):
            return None
        return adapter.validate_json(json.dumps(_sanitize(value), allow_nan=False), strict=True)
    except (ValueError, RecursionError):  # includes JSONDecodeError, UnicodeDecodeError and ValidationError
        return None


def drop_invalid_time(value: datetime | None) -> datetime | None:
    """Return the time, or None if it has no timezone or is not between 1970 and 2100."""
    if value is None or value.tzinfo is None:
        return None
    return value if datetime.fromtimestamp(0, UTC) <= value < LATEST_TIME else None


def _parse_int(digits: str) -> int | None:
    return int(digits) if len(digits) <= len(str(MAX_INTEGER)) else None


def _sanitize(value: Any) -> Any:
    """Drop out-of-range numbers, truncate strings and replace invalid Unicode."""
    if isinstance(value, dict):
        bounded = ((key, _sanitize(item)) for key, item in value.items())
        return {key: item for key, item in bounded if item is not None}
    if isinstance(value, list):
        return [_sanitize(item) for item in value]
    if isinstance(value, str):
        return value[:MAX_TEXT_CHARACTERS].encode("utf-8", "replace").decode()
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return value if abs(value) <= MAX_INTEGER else None
    return value if math.isfinite(value) and abs(value) <= MAX_FLOAT else None
