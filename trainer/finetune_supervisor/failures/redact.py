"""Redacts secrets in termination messages, which are copied to the job's status and events.

Exceptions may quote URLs, headers and settings that contain a token.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from urllib.parse import quote, quote_plus

from finetune_supervisor.contract import CONFIG, HIDDEN_ENV
from finetune_supervisor.messages import TerminationMessage

REPLACEMENT = "***"
_MIN_SECRET_LENGTH = 6  # shorter values also occur in normal text
_MIN_LINE_LENGTH = 16  # shorter lines of a file, such as braces or host names, also occur in normal text
_MAX_VALUES = 64
_MAX_FILES = 64
_MAX_FILE_BYTES = 4096
_PERCENT_CODE = re.compile("%[0-9A-F]{2}")
_SECRET_NAMES = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|CREDENTIALS?)(_|$)", re.IGNORECASE)
_SECRET_FORMATS = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}"  # Hugging Face token
    r"|\bgh[pousr]_[A-Za-z0-9]{30,}"  # GitHub token
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"  # AWS access key
    r"|(?<=://)[^\s/:@]*:[^\s/@]+(?=@)"  # user and password of a URL
    r"|(?<=Bearer )[A-Za-z0-9._~+/-]{8,}=*",
)


def find_secrets(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return all forms of the secret values that the container contains, longest first.

    Secret values are the variables that come from Secrets or have a name such as API_KEY, and the small files of Secret
    volumes. Each value is also returned percent-encoded, escaped as in JSON and Python, and encoded with base64.
    """
    from_secrets = set(env.get(HIDDEN_ENV, "").split(","))
    values = [value for name, value in env.items() if name in from_secrets or _SECRET_NAMES.search(name)]
    values += _read_secret_files(env)
    parts = {part for value in values for part in _split_lines(value) if len(part) >= _MIN_SECRET_LENGTH}
    forms = {form for part in sorted(parts)[:_MAX_VALUES] for form in _list_forms(part)}
    return tuple(sorted(forms, key=lambda form: (-len(form), form)))


def _read_secret_files(env: Mapping[str, str]) -> list[str]:
    """Return the contents of the small text files in the Secret volumes of the job's spec."""
    try:
        volumes = json.loads(Path(env.get(CONFIG, "")).read_text(encoding="utf-8")).get("volumes") or []
        mounts = [Path(volume["mountPath"]) for volume in volumes if volume.get("secret")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # the trainer reports an unreadable spec
        return []
    files = (file for mount in mounts for file in ([mount] if mount.is_file() else mount.glob("**/*")))
    return [text for file in islice(files, _MAX_FILES) if (text := _read_small_file(file)) is not None]


def _read_small_file(file: Path) -> str | None:
    try:
        if not file.is_file() or file.stat().st_size > _MAX_FILE_BYTES:
            return None
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):  # binary values do not appear in messages
        return None


def _split_lines(value: str) -> Iterator[str]:
    """Yield the value, and the long lines of a value with several lines, because a message may quote a single line."""
    yield value.strip()
    lines = value.split("\n")
    if len(lines) > 1:
        yield from (line.strip() for line in lines if len(line.strip()) >= _MIN_LINE_LENGTH)


def _list_forms(value: str) -> Iterator[str]:
    """Yield the value and its encoded forms."""
    yield value
    for encoded in (quote(value, safe=""), quote(value), quote_plus(value)):
        yield encoded
        yield _PERCENT_CODE.sub(lambda code: code[0].lower(), encoded)
    yield json.dumps(value)[1:-1]
    yield json.dumps(value, ensure_ascii=False)[1:-1]
    yield repr(value)[1:-1]
    yield from (form for form in _list_base64_forms(value.encode()) if len(form) >= _MIN_SECRET_LENGTH)


def _list_base64_forms(value: bytes) -> Iterator[str]:
    """Yield the base64 characters that depend on the value alone, for each position of the value in a longer text."""
    for offset in range(3):
        encoded = b64encode(bytes(offset) + value).decode()
        # a character encodes 6 bits; the first one or two also contain the bytes before the value
        form = encoded[-(-offset * 8 // 6) : (offset + len(value)) * 8 // 6]
        yield form
        yield form.replace("+", "-").replace("/", "_")


def redact(text: str, secrets: tuple[str, ...]) -> str:
    """Replace the secrets, and all strings in the format of a known token, with `***` (decisions/213).

    A truncated text may begin with the end of a secret, or end with its beginning; this part is replaced as well.
    """
    for secret in secrets:
        text = text.replace(secret, REPLACEMENT)
    for secret in secrets:
        text = _redact_truncated(text, secret)
    return _SECRET_FORMATS.sub(REPLACEMENT, text)


def _redact_truncated(text: str, secret: str) -> str:
    """Replace the longest end of the secret that starts the text, and the longest beginning that ends it."""
    starts = _find_all(secret, text[:_MIN_SECRET_LENGTH], first=1)
    if leading := next((secret[start:] for start in starts if text.startswith(secret[start:])), ""):
        text = REPLACEMENT + text[len(leading) :]
    ends = [start + _MIN_SECRET_LENGTH for start in _find_all(secret[:-1], text[-_MIN_SECRET_LENGTH:], first=0)]
    if trailing := next((secret[:end] for end in reversed(ends) if text.endswith(secret[:end])), ""):
        text = text[: -len(trailing)] + REPLACEMENT
    return text


def _find_all(secret: str, part: str, *, first: int) -> Iterator[int]:
    """Yield the positions of a part of _MIN_SECRET_LENGTH characters in the secret, from `first`."""
    position = secret.find(part, first) if len(part) == _MIN_SECRET_LENGTH else -1
    while position >= 0:
        yield position
        position = secret.find(part, position + 1)


def redact_termination(termination: TerminationMessage, secrets: tuple[str, ...]) -> TerminationMessage:
    """Redact the message and the stack, because they are visible to everyone who can read the job."""
    return replace(termination, message=redact(termination.message, secrets), stack=redact(termination.stack, secrets))
