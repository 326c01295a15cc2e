"""Redacts secrets in messages that leave the pod: termination messages, /status, report and model card.

Exceptions may quote URLs, headers and settings that contain a token.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from finetune_supervisor import contract
from finetune_supervisor.contract import CONFIG, HIDDEN_ENV
from finetune_supervisor.error_patterns import PATTERNS
from finetune_supervisor.failures.secret_search import MIN_WHOLE_BYTES, find_secret_characters
from finetune_supervisor.messages import Degradation, TerminationMessage

REPLACEMENT = "***"
WITHHELD = "withheld, because it cannot be checked for secrets; see the log of the pod"
UNREAD = ""  # value of a secret that is larger than a Secret of Kubernetes; no free text is published then
_MAX_FILE_BYTES, _MAX_TOTAL_BYTES = 2**20, 33 * 2**20  # 32 volumes with Secrets of at most 1 MiB, and variables
_MAX_TEXT_CHARACTERS = 8192
_MAX_CACHED_MESSAGES = 16
_REDACTED_CLASS = "RedactedError"  # class of an exception whose name contains a secret
SECRET_NAMES = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|CREDENTIALS?)(_|$)", re.IGNORECASE)
_SECRET_FORMATS = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}"  # Hugging Face token
    r"|\bgh[pousr]_[A-Za-z0-9]{30,}"  # GitHub token
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"  # AWS access key
    r"|(?<=://)[^\s/:@]*:[^\s/@]+(?=@)"  # user and password of a URL
    r"|(?<=Bearer )[A-Za-z0-9._~+/-]{8,}=*",
)
# A file of data or code with its line, which is kept, so that the verdict names it whatever the secrets are.
_PLACE = re.compile(r"[\w.-]{1,100}\.(?:jsonl?|csv|parquet|py)(?:\",)? (?:line|row) \d+")
# Words of the protocol, which are never replaced, so that a secret cannot change a verdict.
_PROTOCOL_WORDS = frozenset(
    value for name, value in vars(contract).items() if name.isupper() and isinstance(value, str)
).union(contract.USER_ERRORS, contract.LAUNCH_FAULTS, contract.RANK_FAULTS, PATTERNS)
T = TypeVar("T")


def list_secret_variables(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the variables that come from Secrets or have a name such as API_KEY."""
    from_secrets = set(env.get(HIDDEN_ENV, "").split(","))
    return tuple(name for name in env if name in from_secrets or SECRET_NAMES.search(name))


def find_secrets(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the secret values that the container contains: secret variables, and the files of Secret volumes.

    Bytes that are not UTF-8 are surrogate escapes. With more than Kubernetes allows, the only value is UNREAD.
    """
    files = [content for mount in list_mounts(env, of_secrets=True) for content in _read_files(mount)]
    if max(map(len, files), default=0) > _MAX_FILE_BYTES or sum(map(len, files)) > _MAX_TOTAL_BYTES:
        return (UNREAD,)
    values = (*(os.fsencode(env[name]) for name in list_secret_variables(env)), *map(bytes.strip, files))
    return tuple(os.fsdecode(value) for value in dict.fromkeys(values) if len(value) >= MIN_WHOLE_BYTES)


def list_mounts(env: Mapping[str, str], *, of_secrets: bool) -> tuple[Path, ...]:
    """Return the paths at which the Secrets of the job's spec, or its other volumes, are mounted."""
    try:
        volumes = json.loads(Path(env.get(CONFIG, "")).read_text(encoding="utf-8")).get("volumes") or []
        return tuple(Path(each["mountPath"]) for each in volumes if (each.get("secret") is not None) == of_secrets)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # the trainer reports an unreadable spec
        return ()


def _read_files(mount: Path) -> Iterator[bytes]:
    """Yield the contents of the regular files on the file system of the mount, each once."""
    walk: Iterable[tuple[str, list[str], list[str]]] = [(str(mount.parent), [], [mount.name])]
    for folder, subfolders, names in os.walk(mount) if mount.is_dir() else walk:  # not through links, such as ..data
        subfolders[:] = [name for name in subfolders if not os.path.ismount(os.path.join(folder, name))]
        for path in (Path(folder, name) for name in names):
            with suppress(OSError):  # the program cannot read it either
                if path.is_file() and not path.is_symlink():
                    with path.open("rb") as file:
                        yield file.read(_MAX_FILE_BYTES + 1)


def redact_texts(texts: Sequence[str], secrets: Sequence[str]) -> list[str]:
    """Replace the secrets, and all strings in the format of a known token, with `***` (decisions/213).

    Secrets are found in all encodings that security.md lists, also if a text was cut within one. Of a long text, the
    beginning and the end are kept. A file with its line is kept, unless the name of the file contains a whole secret.
    """
    if UNREAD in secrets:
        return [": ".join((*_PLACE.findall(text)[-1:], WITHHELD)) if text else "" for text in texts]
    half = _MAX_TEXT_CHARACTERS // 2
    shown = [text if len(text) <= 2 * half else f"{text[:half]} [...] {text[-half:]}" for text in texts]
    masks = find_secret_characters(shown, [*map(os.fsencode, secrets)])
    return [_SECRET_FORMATS.sub(REPLACEMENT, _replace(*each, secrets)) for each in zip(shown, masks)]  # noqa: B905


def _replace(text: str, mask: bytearray, secrets: Sequence[str]) -> str:
    """Replace each range of characters whose mask is 1."""
    for place in _PLACE.finditer(text):
        if not any(secret in place[0] for secret in secrets):
            mask[slice(*place.span())] = bytes(len(place[0]))
    for match in reversed([*re.finditer(b"\1+", mask)]):
        text = text[: match.start()] + REPLACEMENT + text[match.end() :]
    return text


class Redactor:
    """Redacts all texts of messages with the secrets of this container, and caches the results."""

    def __init__(self, secrets: tuple[str, ...]) -> None:
        self._redact_texts = lru_cache(_MAX_CACHED_MESSAGES)(
            lambda texts: dict(zip(texts, redact_texts(texts, secrets)))  # noqa: B905 (Python 3.9)
        )

    def redact(self, message: T) -> T:
        """Return the dataclass with redacted texts; words of the protocol, such as outcomes, are unchanged."""
        found: list[str] = []
        _map_texts(message, lambda text: found.append(text) or text)  # type: ignore[func-returns-value]
        redacted = self._redact_texts(tuple(sorted(frozenset(found) - _PROTOCOL_WORDS)))
        result: Any = _map_texts(message, lambda text: redacted.get(text, text))
        if isinstance(message, TerminationMessage) and result.error_type != message.error_type:
            result = replace(result, error_type=_REDACTED_CLASS)
        return result  # type: ignore[no-any-return]


def _map_texts(value: Any, convert: Callable[[str], str]) -> Any:
    """Convert each text in collections and dataclasses, except for keys of a dict and the reason of a degradation."""
    if isinstance(value, str):
        return convert(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_map_texts(item, convert) for item in value)
    if isinstance(value, dict):
        return {key: _map_texts(item, convert) for key, item in value.items()}
    if not is_dataclass(value) or isinstance(value, type):
        return value
    names = ("message",) if isinstance(value, Degradation) else (each.name for each in fields(value))
    return replace(value, **{name: _map_texts(getattr(value, name), convert) for name in names})
