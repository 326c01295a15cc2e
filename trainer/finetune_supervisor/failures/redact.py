"""Secrets are taken out of what a node says of its end, which lands in status and events.

Exceptions quote addresses, headers and settings, so that a token may be part of any of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from finetune_supervisor.contract import HIDDEN_ENV
from finetune_supervisor.failures.termination_message import Termination

HIDDEN = "***"
_SHORTEST = 6  # a shorter value is part of too many words
_NAMED = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|CREDENTIALS?)(_|$)", re.IGNORECASE)
_SHAPES = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}"  # Hugging Face
    r"|\bgh[pousr]_[A-Za-z0-9]{30,}"  # GitHub
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"  # AWS
    r"|(?<=://)[^\s/:@]*:[^\s/@]+(?=@)"  # user and password of an address
    r"|(?<=Bearer )[A-Za-z0-9._~+/-]{8,}=*",
)


def secrets_of(env: Mapping[str, str]) -> tuple[str, ...]:
    """Values of variables that come from Secrets, and of those whose names say so; the longest first."""
    from_secrets = set(env.get(HIDDEN_ENV, "").split(","))
    values = {value for name, value in env.items() if name in from_secrets or _NAMED.search(name)}
    return tuple(sorted((value for value in values if len(value) >= _SHORTEST), key=len, reverse=True))


def redact(text: str, secrets: tuple[str, ...]) -> str:
    """The text without these values, and without what has the shape of a key."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return _SHAPES.sub(HIDDEN, text)


def redacted(termination: Termination, secrets: tuple[str, ...]) -> Termination:
    """Last words that may be shown to whoever can read the job."""
    return replace(termination, message=redact(termination.message, secrets), stack=redact(termination.stack, secrets))
