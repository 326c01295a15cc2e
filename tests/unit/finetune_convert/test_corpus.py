"""Converts a corpus of commands and configs in the style of the tools' documentation, and compares with golden files.

UPDATE_GOLDENS=1 rewrites the golden files; review their diff.
"""

import os
from collections import Counter
from pathlib import Path

import pytest

from finetune_convert.conversion import Conversion, ConversionRequest, EntryEffect
from finetune_convert.convert import convert, find_problems
from finetune_convert.render import render_summary, render_yaml

CORPUS = sorted((Path(__file__).parent / "corpus").iterdir())
GOLDENS = Path(__file__).parent / "goldens"
MIN_CORPUS = 70
MAX_LINE = 120
SECRETS = (
    "hf_aaaaaaaaaaaaaaaaaaaaaaaa",
    "hf_bbbbbbbbbbbbbbbbbbbbbbbb",
    "hf_cccccccccccccccccccccccc",
    "ms-0123456789",
    "0123456789abcdef0123456789abcdef01234567",
)


def convert_file(path: Path) -> Conversion:
    return convert(path.read_text(), ConversionRequest())


def test_the_corpus_is_large() -> None:
    assert len(CORPUS) >= MIN_CORPUS
    assert {path.stem for path in GOLDENS.iterdir()} == {path.name for path in CORPUS}


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_job_and_differences_equal_the_golden_file(path: Path) -> None:
    conversion = convert_file(path)
    golden = GOLDENS / f"{path.name}.txt"
    text = f"{render_yaml(conversion)}---\n{render_summary(conversion)}\n"
    if os.environ.get("UPDATE_GOLDENS") == "1":
        golden.write_text(text)

    assert golden.exists(), f"no {golden.name}; UPDATE_GOLDENS=1 writes it"
    assert text == golden.read_text()
    assert find_problems(conversion.job) == ()


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_lines_of_a_job_have_at_most_120_characters(path: Path) -> None:
    lines = render_yaml(convert_file(path)).splitlines()

    assert [line for line in lines if len(line) > MAX_LINE] == []


def test_an_option_has_a_line_only_if_the_input_contains_it() -> None:
    options = [
        (path, entry.option)
        for path in CORPUS
        for entry in convert_file(path).entries
        if entry.line is not None and entry.option.startswith("--")
    ]

    assert len(options) > 100
    assert [(path.name, option) for path, option in options if option.lstrip("-") not in path.read_text()] == []


@pytest.mark.parametrize("secret", SECRETS)
def test_no_secret_of_the_corpus_is_in_an_output(secret: str) -> None:
    inputs = [path for path in CORPUS if secret in path.read_text()]

    assert inputs
    assert not [golden.name for golden in GOLDENS.iterdir() if secret in golden.read_text()]


def test_all_options_of_the_corpus_are_those_of_the_tools() -> None:
    unknown = {path.name for path in CORPUS if convert_file(path).select(EntryEffect.UNKNOWN)}

    assert unknown == {"swift3-unknown-options.sh"}


def test_the_corpus_contains_both_forms() -> None:
    forms = Counter("command" in convert_file(path).job["spec"] for path in CORPUS)

    assert min(forms[True], forms[False]) >= 25
