"""Tests that no secret is readable in a redacted text, in whatever encoding and wherever the text was cut."""

import html
import json
import random
import shlex
import string
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Callable, Sequence
from urllib.parse import quote, quote_plus

import pytest

from finetune_supervisor.failures.redact import redact_texts

_ALPHABETS = (
    string.ascii_lowercase,
    string.ascii_letters + string.digits,
    string.printable[:95],
    "aé~%+&<'\"\\/$ü€😀 ",
)
_ENCODINGS: dict[str, Callable[[str], str]] = {
    "plain": str,
    "percent": lambda text: quote(text, safe=""),
    "percent with slash": quote,
    "form": quote_plus,
    "json": lambda text: json.dumps(text)[1:-1],
    "json with unicode": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    "json in json": lambda text: json.dumps(json.dumps(text))[1:-1],
    "repr": lambda text: repr(text)[1:-1],
    "repr of bytes": lambda text: repr(text.encode())[2:-1],
    "shell": shlex.quote,
    "base64": lambda text: b64encode(text.encode()).decode(),
    "base64 at offset 1": lambda text: b64encode(b"u" + text.encode() + b":x").decode(),
    "base64 at offset 2": lambda text: b64encode(b"us" + text.encode()).decode(),
    "base64url": lambda text: urlsafe_b64encode(text.encode()).decode(),
    "hex": lambda text: text.encode().hex(),
    "html": html.escape,
    "html of json": lambda text: html.escape(json.dumps(text)[1:-1]),
    "base64 of json": lambda text: b64encode(json.dumps({"token": text}).encode()).decode(),
}


def _draw_value(generator: random.Random) -> str:
    alphabet = generator.choice(_ALPHABETS)
    value = "".join(generator.choice(alphabet) for _ in range(generator.randint(8, 40))).strip()
    return value if len(value) >= 8 else "fallback-1"


def _write_secret(generator: random.Random, kind: str, value: str) -> str:
    """Return the content of a variable or file that contains the value."""
    if kind == "pem":
        lines = ["".join(generator.choices(string.ascii_letters + string.digits + "+/", k=64)) for _ in range(20)]
        return "\n".join(["-----BEGIN PRIVATE KEY-----", *lines, value, "-----END PRIVATE KEY-----"])
    if kind == "json":
        return json.dumps({"type": "account", "password": value, "url": "https://example.com/token"}, indent=1)
    if kind == "toml":
        return f"[section]\nuser = 'somebody'\npassword = {json.dumps(value)}\n"
    return value


def _is_readable(value: str, text: str) -> bool:
    return any(encode(value) in text for encode in _ENCODINGS.values())


@pytest.mark.parametrize("first_seed", range(0, 1000, 100))
def test_no_secret_is_readable_in_any_output(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 100):
        generator = random.Random(seed)
        values = [_draw_value(generator) for _ in range(generator.randint(1, 4))]
        secrets = tuple(
            _write_secret(generator, generator.choice(("variable", "pem", "json", "toml")), value) for value in values
        )
        text = _write_text(generator, values)
        start, end = sorted(generator.sample(range(len(text)), 2))
        for cut in (text, text[start:], text[:end]):
            (redacted,) = redact_texts((cut,), secrets)
            assert not [value for value in values if _is_readable(value, redacted)], (seed, cut, redacted, values)


def _write_text(generator: random.Random, values: Sequence[str]) -> str:
    """Return an error message that contains the values, each in a random encoding."""
    words = [
        "cannot",
        "log",
        "in",
        "at",
        "https://example.com/v1",
        "with",
        "the",
        "header",
        "of",
        "rank",
        "3:",
        "error",
        "401",
    ]
    pieces = [generator.choice(words) for _ in range(20)]
    for value in values:
        encode = generator.choice(tuple(_ENCODINGS.values()))
        pieces.insert(generator.randrange(len(pieces)), encode(value))
    return generator.choice((" ", "'")).join(pieces)
