"""No secret in what a node says of its end."""

import pytest

from finetune_supervisor.failures.redact import redact, redacted, secrets_of
from finetune_supervisor.failures.termination_message import Termination

TOKEN = "hf_" + "a1B2" * 8
ENV = {
    "FINETUNE_HIDDEN_ENV": "DATABASE,SHORT",
    "DATABASE": "postgres-pass-1",
    "SHORT": "abc",
    "WANDB_API_KEY": "0123456789abcdef",
    "HOME": "/home/trainer",
    "TOKENIZERS_PATH": "/models/bert",
}


def test_values_from_secrets_and_by_name_are_secret() -> None:
    assert secrets_of(ENV) == ("0123456789abcdef", "postgres-pass-1")
    assert secrets_of({}) == ()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        pytest.param("cannot log in with postgres-pass-1!", "cannot log in with ***!", id="from a Secret"),
        pytest.param("key 0123456789abcdef is wrong", "key *** is wrong", id="by its name"),
        pytest.param(f"401 for token {TOKEN}", "401 for token ***", id="a token that nobody named"),
        pytest.param("proxy http://me:pw@proxy:80/x", "proxy http://***@proxy:80/x", id="an address"),
        pytest.param("{'Authorization': 'Bearer abcdef.123-xyz'}", "{'Authorization': 'Bearer ***'}", id="a header"),
        pytest.param("node 1 rank 5: KeyError: 'messages' at http://host:80/a", None, id="nothing"),
        pytest.param("ghost_writer abc AKIA hf_hub_download", None, id="words that only look like it"),
    ],
)
def test_what_is_secret_is_hidden_and_nothing_else(text: str, shown: str | None) -> None:
    assert redact(text, secrets_of(ENV)) == (text if shown is None else shown)


def test_a_secret_that_holds_another_goes_whole() -> None:
    assert (
        redact("prefix-secret-value", secrets_of({"A_TOKEN": "secret-value", "B_TOKEN": "prefix-secret-value"}))
        == "***"
    )


def test_message_and_stack_are_cleared() -> None:
    said = Termination(0, 0, message="m postgres-pass-1", stack=f"File x\n  login({TOKEN!r})")

    shown = redacted(said, secrets_of(ENV))
    assert (shown.message, shown.stack) == ("m ***", "File x\n  login('***')")
