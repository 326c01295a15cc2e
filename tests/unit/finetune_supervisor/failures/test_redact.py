"""Tests of redacting secrets in termination messages."""

import json
import random
import time
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest

from finetune_supervisor.contract import LAUNCH_FAULTS, RANK_FAULTS, USER_ERRORS
from finetune_supervisor.error_patterns import PATTERNS
from finetune_supervisor.failures.redact import Redactor, find_secrets, redact_texts
from finetune_supervisor.messages import Degradation, PeakMemory, TerminationMessage, TrainingProgress

TOKEN = "hf_" + "a1B2" * 8
ENV = {
    "FINETUNE_HIDDEN_ENV": "DATABASE,SHORT",
    "DATABASE": "postgres-pass-1",
    "SHORT": "abc",
    "WANDB_API_KEY": "0123456789abcdef",
    "HOME": "/home/trainer",
    "TOKENIZERS_PATH": "/models/bert",
}


def redact(text: str, secrets: Sequence[str]) -> str:
    return redact_texts((text,), secrets)[0]


def test_values_of_secret_variables_are_found() -> None:
    secrets = find_secrets(ENV)

    assert set(secrets) == {"0123456789abcdef", "postgres-pass-1"}
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
    (secret / "large").write_text("large-file-1\n" * 1000)
    (secret / "link").symlink_to(config_map)
    (config_map / "name").write_text("public-value-1")
    volumes = [
        {"name": "s", "mountPath": str(secret), "secret": {"secretName": "s"}},
        {"name": "c", "mountPath": str(config_map), "configMap": {"name": "c"}},
        {"name": "f", "mountPath": str(tmp_path / "missing"), "secret": {"secretName": "f"}},
    ]
    config.write_text(json.dumps({"volumes": volumes}))
    return {"FINETUNE_CONFIG": str(config)}


def test_values_in_files_of_secret_volumes_are_replaced(secret_volume: dict[str, str]) -> None:
    secrets = find_secrets(secret_volume)

    assert redact("401 for volume-token-1.", secrets) == "401 for ***."
    assert redact("bad key MIIEvQIBADANBgkqhkiG9w0B: abc", secrets) == "bad key ***: abc"
    assert redact("public-value-1 large-file-1", secrets) == "public-value-1 ***"
    assert redact(f"read {bytes(range(20, 60))!r}", secrets) == "read b'***'"


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
        pytest.param("refused: s-pass", None, id="six characters in the middle of a secret"),
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


def test_a_volume_with_a_certificate_does_not_switch_off_the_redaction_of_tokens(tmp_path: Path) -> None:
    key = "\n".join(b64encode(sha256(bytes([line])).digest() * 2).decode()[:64] for line in range(49))
    (tmp_path / "secret").mkdir()
    for name in ("tls.key", "tls.crt", "ca.crt"):
        (tmp_path / "secret" / name).write_text(f"{name}\n{key}\n")
    volume = {"name": "s", "mountPath": str(tmp_path / "secret"), "secret": {"secretName": "s"}}
    (tmp_path / "job.json").write_text(json.dumps({"volumes": [volume]}))
    env = {
        "FINETUNE_CONFIG": str(tmp_path / "job.json"),
        "WANDB_API_KEY": "f3a9c1d2e4",
        "MY_PASSWORD": "wonderful-horse-77",
    }

    text = f"f3a9c1d2e4 wonderful-horse-77 {key}"

    assert redact(text, find_secrets(env)).replace("***", "").split() == []


def test_as_many_secrets_as_kubernetes_allows_are_found_within_seconds() -> None:
    generator = random.Random(1)
    lines = [b64encode(generator.randbytes(48)).decode() for _ in range(16_000)]
    secrets = tuple("\n".join([str(number), *lines[number:], *lines[:number]]) for number in range(32))
    started_at = time.process_time()

    redacted = redact(f"key {lines[7]} {'x' * 4000}", secrets)

    assert redacted == f"key *** {'x' * 4000}"
    assert time.process_time() - started_at < 20


def test_no_text_is_published_beyond_the_bound(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x" * (2**20 + 1))
    volume = {"name": "s", "mountPath": str(tmp_path / "secret"), "secret": {"secretName": "s"}}
    (tmp_path / "job.json").write_text(json.dumps({"volumes": [volume]}))

    redactor = Redactor(find_secrets({"FINETUNE_CONFIG": str(tmp_path / "job.json")}))
    termination = redactor.redact(TerminationMessage(0, 0, outcome="failed", error_type="DiskFull", message="any text"))

    assert (termination.outcome, termination.error_type) == ("failed", "DiskFull")
    assert termination.message.startswith("withheld")


@pytest.mark.parametrize("is_read", [True, False])
def test_a_file_with_its_line_is_kept(is_read: bool) -> None:
    text = "DatasetError: /data/rows-1.jsonl line 4: expected one JSON object"

    redacted = redact(text, (text if is_read else "",))

    assert "rows-1.jsonl line 4" in redacted
    assert "expected" not in redacted
    assert redact("a1b2c3d4.jsonl line 4", ("a1b2c3d4",)) == "***.jsonl line 4"


def test_all_texts_of_a_message_are_redacted() -> None:
    progress = TrainingProgress(ended="at postgres-pass-1", memory=PeakMemory(cause="step 1 of postgres-pass-1"))
    message = TerminationMessage(0, 0, error_type="postgres_pass_1", phase="train", progress=progress)

    redacted = Redactor(("postgres-pass-1", "postgres_pass_1", "train")).redact(message)

    assert redacted.phase == "train"
    assert redacted.error_type == "RedactedError"
    assert redacted.progress == TrainingProgress(ended="at ***", memory=PeakMemory(cause="step 1 of ***"))
    degradation = Redactor(("postgres-pass-1",)).redact((Degradation("Slow", "by postgres-pass-1"),))
    assert degradation == (Degradation("Slow", "by ***"),)


def test_the_class_of_an_error_by_which_the_operator_decides_is_kept() -> None:
    for name in (*USER_ERRORS, *LAUNCH_FAULTS, *RANK_FAULTS, *PATTERNS):
        assert Redactor((name,)).redact(TerminationMessage(0, 0, error_type=name)).error_type == name


def test_message_and_stack_are_redacted() -> None:
    termination = TerminationMessage(0, 0, message="m postgres-pass-1", stack=f"File x\n  login({TOKEN!r})")

    redacted = Redactor(find_secrets(ENV)).redact(termination)
    assert (redacted.message, redacted.stack) == ("m ***", "File x\n  login('***')")
