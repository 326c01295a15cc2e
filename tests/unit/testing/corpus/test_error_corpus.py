"""Tests of the labelled corpus: every line has a source, and no line identifies a person or a machine."""

import ipaddress
import re
from dataclasses import dataclass

import pytest

from testing.corpus.error_corpus import read_corpus, read_start_failures

MAX_TEXT_LENGTH = 400
PUBLIC_DOMAINS = (
    *("developer.mozilla.org", "docker.com", "docker.io", "docs.nvidia.com", "errors.pydantic.dev", "gcr.io"),
    *("ghcr.io", "github.com", "hf.co", "huggingface.co", "huggingface.tech", "icr.io", "kagent.dev"),
    *("kubernetes.io", "k8s.io", "l5d.io", "mcr.microsoft.com", "modelscope.cn", "mscr.io", "numpy.org"),
    *("nvidia.com", "openshift.org", "pkg.dev", "pytorch.org", "quay.io", "redhat.com", "s3.amazonaws.com"),
)
PLACEHOLDER_DOMAINS = ("registry.example.com", "host-0.invalid", "host-1.invalid", "hub.invalid")
PLACEHOLDER_NETWORKS = [ipaddress.ip_network(network) for network in ("10.0.0.0/24", "127.0.0.0/8", "0.0.0.0/32")]
SOURCE = re.compile(r"[\w.-]+/[\w.-]+#\d+|https://\S+( \(\S+\))?|provoked: .+, .+")
DOMAIN = re.compile(r"[\w-]+(?:\.[\w-]+)*\.(?:co|com|cn|dev|example|internal|invalid|io|local|net|org|tech)\b(?!\.\w)")
ADDRESS = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])")


@dataclass(frozen=True)
class CorpusLine:
    """Text and source of a line of the corpus."""

    text: str
    source: str


LINES = [
    *(CorpusLine(entry.text, entry.source) for part in (False, True) for entry in read_corpus(held_out=part)),
    *(CorpusLine(entry.text, entry.source) for part in (False, True) for entry in read_start_failures(held_out=part)),
]


def find_personal_details(text: str) -> list[str]:
    """Return what identifies a person or a machine: home folders, e-mail and IP addresses, domains and tokens."""
    homes = [name for name in re.findall(r"/(?:home|Users)/([\w.-]+)", text) if name not in ("user", "nonroot")]
    homes += re.findall(r"(?:[A-Z]:\\Users\\)[\w.-]+", text)
    mails = re.findall(r"[\w.+-]+@[\w.-]+", text)
    addresses = [address for address in ADDRESS.findall(text) if not _is_placeholder_address(address)]
    domains = [name for name in DOMAIN.findall(text) if not _is_public_domain(name)]
    tokens = re.findall(r"\b(?:hf_\w{20,}|gh[pousr]_\w{20,}|AKIA[0-9A-Z]{12,}|xox[bp]-\w+)", text)
    return [*homes, *mails, *addresses, *domains, *tokens]


def _is_placeholder_address(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    return any(parsed in network for network in PLACEHOLDER_NETWORKS)


def _is_public_domain(name: str) -> bool:
    return name in PLACEHOLDER_DOMAINS or any(f".{name}".endswith(f".{domain}") for domain in PUBLIC_DOMAINS)


def test_no_line_contains_personal_details() -> None:
    found = {line.source: details for line in LINES if (details := find_personal_details(line.text))}

    assert len(LINES) > 800
    assert found == {}


@pytest.mark.parametrize(
    "text",
    [
        *("No such file or directory: '/home/jane/train.jsonl'",),
        *("No such file or directory: '/Users/jane/train.jsonl'",),
        *(r"No such file or directory: 'C:\Users\jane\train.jsonl'", "commit of jane@gpu7"),
        *("Connect to 192.168.1.9<54263> failed", "Get https://registry.acme.com/v2/: EOF"),
        *("the name gpu7.cluster.local does not resolve", "invalid token hf_abcdefghijklmnopqrstuvwx"),
    ],
)
def test_personal_details_are_found(text: str) -> None:
    assert len(find_personal_details(text)) == 1


def test_every_line_has_a_source() -> None:
    assert [line for line in LINES if not SOURCE.fullmatch(line.source)] == []


def test_no_text_is_longer_than_what_the_status_keeps() -> None:
    assert [line for line in LINES if len(line.text) > MAX_TEXT_LENGTH] == []


def test_no_line_of_the_training_set_is_held_out() -> None:
    training_set, held_out = (
        {(entry.message, entry.source) for entry in read_corpus(held_out=part)}
        | {(entry.text, entry.source) for entry in read_start_failures(held_out=part)}
        for part in (False, True)
    )

    assert training_set.isdisjoint(held_out)
