"""Tests of the escapes of control characters in text, JSON and YAML."""

import json
import sys
import unicodedata

import pytest
import yaml

from finetune_api.visible_text import escape_controls, escape_log_line, render_json
from finetune_api.yaml_documents import dump_yaml

BIDIRECTIONAL = ("BN", "LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
CLIPBOARD = "\x1b]52;c;cm0gLXJm\x07"


def is_hidden(character: str) -> bool:
    """Return whether a character has to be an escape, by the properties of Unicode."""
    category, code = unicodedata.category(character), ord(character)
    marks = character in "\u061c\u200e\u200f"  # directional marks have the classes of letters
    directs_text = category == "Cf" and unicodedata.bidirectional(character) in BIDIRECTIONAL[1:]
    is_tag = 0xE0000 <= code <= 0xE007F
    return (category in ("Cc", "Cs", "Zl", "Zp") and character not in "\t\n") or marks or directs_text or is_tag


def test_exactly_the_hidden_characters_of_unicode_become_escapes() -> None:
    wrong = [
        code for code in range(sys.maxunicode + 1) if (escape_controls(chr(code)) != chr(code)) != is_hidden(chr(code))
    ]

    assert wrong == []


def test_escapes_are_ascii_and_are_not_escaped_again() -> None:
    text = f"{CLIPBOARD}\x9b\r\u202e\U000e0041\ud83d 训\tx\n"

    shown = escape_controls(text)

    assert shown == "\\x1b]52;c;cm0gLXJm\\x07\\x9b\\r\\u202e\\U000e0041\\ud83d 训\tx\n"
    assert escape_controls(shown) == shown


@pytest.mark.parametrize(
    "text", [CLIPBOARD, "a\x9bb\x85c", "\u202e\u2066", "\u2028\u2029\u200f", "\U000e0041", "\ud83d", "\x7f\r\n\t训"]
)
def test_documents_contain_no_hidden_character_and_keep_their_values(text: str) -> None:
    document = {"key " + text: [text, {"nested": f"long {'word ' * 40}{text}"}], "plain": "训练: 1e-4"}

    for rendered, parsed in (
        ((shown := render_json(document, indent=2)), json.loads(shown)),
        ((shown := dump_yaml(document)), yaml.safe_load(shown)),
    ):
        assert escape_controls(rendered) == rendered
        assert parsed == document


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        pytest.param("\x1b[1;31mred\x1b[0m", "\x1b[1;31mred\x1b[0m\x1b[0m", id="colour"),
        pytest.param(
            "\x1b[38;5;8mgrey \x1b[48;2;8;8;8mx\x1b[m", "\x1b[38;5;8mgrey \x1b[48;2;8;8;8mx\x1b[m\x1b[0m", id="palette"
        ),
        pytest.param("\x1b[8mhidden", "\\x1b[8mhidden", id="hidden text"),
        pytest.param("\x1b[1;08mhidden", "\\x1b[1;08mhidden", id="hidden text after another code"),
        pytest.param("\x1b[2J\x1b]0;t\x07\x1b[31m", "\\x1b[2J\\x1b]0;t\\x07\x1b[31m\x1b[0m", id="other sequences"),
        pytest.param("\x9b31mx", "\\x9b31mx", id="C1"),
        pytest.param("real\rforged", "real\\rforged", id="overwritten"),
        pytest.param("windows\r", "windows", id="end of a line"),
    ],
)
def test_colours_of_a_log_pass_and_end_with_its_line(line: str, shown: str) -> None:
    assert escape_log_line(line) == shown
