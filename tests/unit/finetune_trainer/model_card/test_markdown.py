"""Tests that untrusted values stay text in Markdown, with a parser of CommonMark and tables."""

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from finetune_trainer.model_card.markdown import as_code, as_text, render_table

HOSTILE = (
    "<script>alert(1)</script>",
    "a | b",
    "`; rm -rf /` ```\n# heading",
    "[click](https://example.org) ![x](https://example.org/x.png)",
    "&lt;b&gt; *bold* __bold__ ~~gone~~ $x$ @somebody \\",
    "www.example.org https://example.org",
    "--- \n\r\u2028\u2029 ---",
    "``a``",
    "",
)


def parse_cells(markdown: str) -> list[list[Token]]:
    """Return the inline tokens of each cell of the body of the only table."""
    tokens = MarkdownIt("commonmark").enable("table").parse(markdown)
    assert [token.type for token in tokens if token.level == 0] == ["table_open", "table_close"]
    inside = [index for index, token in enumerate(tokens) if token.type == "td_open"]
    return [tokens[index + 1].children or [] for index in inside]


def normalize(text: str) -> str:
    return " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f]", " ", text).split())


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize(("render", "token_type"), [(as_text, "text"), (as_code, "code_inline")])
def test_a_hostile_value_is_one_cell_of_plain_text(value: str, render: Callable[[str], str], token_type: str) -> None:
    first, second = parse_cells(render_table(("a", "b"), [(render(value), "next")]))

    assert {token.type for token in first} <= {token_type, "text_special", "text"}
    assert normalize("".join(token.content for token in first)) == (normalize(value) or "(empty)")
    assert [token.content for token in second] == ["next"]


@given(st.text(max_size=200))
def test_any_value_is_one_cell_of_its_text(value: str) -> None:
    code, text = parse_cells(render_table(("a", "b"), [(as_code(value), as_text(value))]))

    assert {token.type for token in code} == {"code_inline"}
    assert {token.type for token in text} <= {"text", "text_special"}


def test_a_long_value_is_truncated() -> None:
    assert len(as_code("x" * 10_000)) < 400
