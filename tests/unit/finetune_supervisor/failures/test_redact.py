"""Tests of redacting secrets in termination messages."""

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
    assert find_secrets(ENV) == ("0123456789abcdef", "postgres-pass-1")
    assert find_secrets({}) == ()


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


def test_message_and_stack_are_redacted() -> None:
    termination = TerminationMessage(0, 0, message="m postgres-pass-1", stack=f"File x\n  login({TOKEN!r})")

    redacted = redact_termination(termination, find_secrets(ENV))
    assert (redacted.message, redacted.stack) == ("m ***", "File x\n  login('***')")
