"""Redacts secrets in termination messages, which are copied to the job's status and events.

Exceptions may quote URLs, headers and settings that contain a token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from finetune_supervisor.contract import HIDDEN_ENV
from finetune_supervisor.messages import TerminationMessage

REPLACEMENT = "***"
_MIN_SECRET_LENGTH = 6  # shorter values also occur in normal text
_SECRET_NAMES = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|CREDENTIALS?)(_|$)", re.IGNORECASE)
_SECRET_FORMATS = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}"  # Hugging Face token
    r"|\bgh[pousr]_[A-Za-z0-9]{30,}"  # GitHub token
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"  # AWS access key
    r"|(?<=://)[^\s/:@]*:[^\s/@]+(?=@)"  # user and password of a URL
    r"|(?<=Bearer )[A-Za-z0-9._~+/-]{8,}=*",
)


def find_secrets(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values of variables that come from Secrets or have a name such as API_KEY, longest first."""
    from_secrets = set(env.get(HIDDEN_ENV, "").split(","))
    values = {value for name, value in env.items() if name in from_secrets or _SECRET_NAMES.search(name)}
    return tuple(sorted((value for value in values if len(value) >= _MIN_SECRET_LENGTH), key=len, reverse=True))


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
    lengths = range(len(secret) - 1, _MIN_SECRET_LENGTH - 1, -1)
    if leading := next((length for length in lengths if text.startswith(secret[-length:])), 0):
        text = REPLACEMENT + text[leading:]
    if trailing := next((length for length in lengths if text.endswith(secret[:length])), 0):
        text = text[:-trailing] + REPLACEMENT
    return text


def redact_termination(termination: TerminationMessage, secrets: tuple[str, ...]) -> TerminationMessage:
    """Redact the message and the stack, because they are visible to everyone who can read the job."""
    return replace(termination, message=redact(termination.message, secrets), stack=redact(termination.stack, secrets))
