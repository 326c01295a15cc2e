"""Tests of redacting secrets in termination messages."""

import json
import time
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest

from finetune_supervisor.failures.redact import find_secrets, redact, redact_termination
from finetune_supervisor.messages import TerminationMessage

TOKEN = "hf_" + "a1B2" * 8
ENV = {
    "FINETUNE_HIDDEN_ENV": "DATABASE,SHORT",
    "DATABASE": "postgres-pass-1",
    "SHORT": "abc",
    "WANDB_API_KEY": "0123456789abcdef",
    "HOME": "/home/trainer",
    "TOKENIZERS_PATH": "/models/bert",
}


def test_values_of_secret_variables_are_found() -> None:
    secrets = find_secrets(ENV)

    assert {"0123456789abcdef", "postgres-pass-1"} < set(secrets)
    assert not {"abc", "/home/trainer", "/models/bert"} & set(secrets)
    assert find_secrets({}) == ()


AWKWARD = 'pa/ss "w?rd" é~%\\n>'
AWKWARD_BYTES = AWKWARD.encode()


@pytest.mark.parametrize(
    "encoded",
    [
        pytest.param(quote(AWKWARD, safe=""), id="percent"),
        pytest.param(quote(AWKWARD), id="percent with slash"),
        pytest.param(quote_plus(AWKWARD), id="form"),
        pytest.param("pa%2fss+%22w%3frd%22+%c3%a9~%25%5cn%3e", id="form in lower case"),
        pytest.param(json.dumps(AWKWARD)[1:-1], id="json"),
        pytest.param(json.dumps(AWKWARD, ensure_ascii=False)[1:-1], id="json with unicode"),
        pytest.param(repr(AWKWARD)[1:-1], id="python"),
    ],
)
def test_encoded_secret_is_replaced(encoded: str) -> None:
    assert redact(f"sent {encoded}!", find_secrets({"DB_PASSWORD": AWKWARD})) == "sent ***!"


@pytest.mark.parametrize("user", ["", "a", "ab", "user:", "robot:"])
@pytest.mark.parametrize("encode", [b64encode, urlsafe_b64encode])
def test_secret_inside_a_base64_text_is_replaced(user: str, encode: Callable[[bytes], bytes]) -> None:
    text = encode(user.encode() + AWKWARD_BYTES + b"@end").decode()

    redacted = redact(f"Basic {text}", find_secrets({"DB_PASSWORD": AWKWARD}))

    assert "***" in redacted
    assert len(redacted) < len("Basic ***") + len(encode(user.encode() + b"@end")) + 4


@pytest.fixture
def secret_volume(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a job with a Secret volume, a ConfigMap volume and files of several kinds."""
    secret, config_map, config = tmp_path / "secret", tmp_path / "config-map", tmp_path / "job.json"
    (secret / "..data").mkdir(parents=True)
    config_map.mkdir()
    (secret / "token").write_text("volume-token-1\n")
    (secret / "key.pem").write_text("-----BEGIN KEY-----\nMIIEvQIBADANBgkqhkiG9w0B\nabc\n-----END KEY-----\n")
    (secret / "binary").write_bytes(bytes(range(256)))
    (secret / "large").write_text("large-file-1" * 1000)
    (config_map / "name").write_text("public-value-1")
    volumes = [
        {"name": "s", "mountPath": str(secret), "secret": {"secretName": "s"}},
        {"name": "c", "mountPath": str(config_map), "configMap": {"name": "c"}},
        {"name": "f", "mountPath": str(tmp_path / "missing"), "secret": {"secretName": "f"}},
    ]
    config.write_text(json.dumps({"volumes": volumes}))
    return {"FINETUNE_CONFIG": str(config)}


def test_values_in_small_files_of_secret_volumes_are_replaced(secret_volume: dict[str, str]) -> None:
    secrets = find_secrets(secret_volume)

    assert redact("401 for volume-token-1.", secrets) == "401 for ***."
    assert redact("bad key MIIEvQIBADANBgkqhkiG9w0B: abc", secrets) == "bad key ***: abc"
    assert redact("public-value-1 large-file-1", secrets) == "public-value-1 large-file-1"


@pytest.mark.parametrize("content", ["", "[]", '{"volumes": [{"secret": {}, "mountPath": 1}]}', '{"volumes": 3}'])
def test_unreadable_spec_has_no_secret_files(tmp_path: Path, content: str) -> None:
    (tmp_path / "job.json").write_text(content)

    assert find_secrets({"FINETUNE_CONFIG": str(tmp_path / "job.json")}) == ()


def test_many_long_secrets_are_replaced_within_a_second() -> None:
    secrets = find_secrets({f"S{number}_TOKEN": f"{number}-" + "x%" * 2000 for number in range(100)})
    started_at = time.process_time()

    redact("y" * 3000, secrets)

    assert time.process_time() - started_at < 1


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        pytest.param("cannot log in with postgres-pass-1!", "cannot log in with ***!", id="from a Secret"),
        pytest.param("key 0123456789abcdef is wrong", "key *** is wrong", id="secret name"),
        pytest.param(f"401 for token {TOKEN}", "401 for token ***", id="token format"),
        pytest.param("proxy http://me:pw@proxy:80/x", "proxy http://***@proxy:80/x", id="credentials in a URL"),
        pytest.param("{'Authorization': 'Bearer abcdef.123-xyz'}", "{'Authorization': 'Bearer ***'}", id="header"),
        pytest.param("node 1 rank 5: KeyError: 'messages' at http://host:80/a", None, id="no secret"),
        pytest.param("ghost_writer abc AKIA hf_hub_download", None, id="similar words"),
    ],
)
def test_only_secrets_are_replaced(text: str, redacted: str | None) -> None:
    assert redact(text, find_secrets(ENV)) == (text if redacted is None else redacted)


def test_secret_that_contains_another_secret_is_replaced_completely() -> None:
    assert (
        redact("prefix-secret-value", find_secrets({"A_TOKEN": "secret-value", "B_TOKEN": "prefix-secret-value"}))
        == "***"
    )


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        pytest.param("gres-pass-1 was refused", "*** was refused", id="end of a secret at the start"),
        pytest.param("refused: postgres-p", "refused: ***", id="start of a secret at the end"),
        pytest.param("pass-1 was refused", "*** was refused", id="six characters"),
        pytest.param("ass-1 was refused", None, id="five characters"),
        pytest.param("it was refused: pos", None, id="three characters"),
    ],
)
def test_truncated_secret_at_the_border_of_a_text_is_replaced(text: str, redacted: str | None) -> None:
    assert redact(text, ("postgres-pass-1",)) == (text if redacted is None else redacted)


@pytest.mark.parametrize(
    ("secret", "text", "redacted"),
    [
        pytest.param("xyz-a-b-c-a-b-c-a-b-c-", "a-b-c-a-b-c- was refused", "*** was refused", id="end of the secret"),
        pytest.param("a-b-c-a-b-c-a-b-c-xyz", "refused: a-b-c-a-b-c-", "refused: ***", id="beginning of the secret"),
    ],
)
def test_the_longest_part_of_a_truncated_secret_with_repetitions_is_replaced(
    secret: str, text: str, redacted: str
) -> None:
    assert redact(text, (secret,)) == redacted


def test_message_and_stack_are_redacted() -> None:
    termination = TerminationMessage(0, 0, message="m postgres-pass-1", stack=f"File x\n  login({TOKEN!r})")

    redacted = redact_termination(termination, find_secrets(ENV))
    assert (redacted.message, redacted.stack) == ("m ***", "File x\n  login('***')")
