"""Compare Chinese pages with the English pages that they translate.

README.zh-CN.md translates README.md, and docs/zh/<page> translates docs/<page>. A Chinese page links to its English
page and has the same fenced code blocks in the same order. In a line of a block, a comment begins with # at the start
of the line or after whitespace; its text may be translated. All other characters of the blocks are identical.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

BLOCK = re.compile(r"^(```|~~~)(?P<language>[^\n]*)\n(?P<content>.*?)^\1", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_COMMENT = re.compile(r"(^|\s)#.*$")


@dataclass(frozen=True)
class CodeBlock:
    """A fenced code block of a page, with the text of its comments removed."""

    line: int  # number of the line of the opening fence, starting at 1
    language: str
    lines: tuple[str, ...]


def get_original(path: Path, *, root: Path) -> Path | None:
    """Return the English page that a page translates, or None for a page that is not a translation."""
    if path == root / "README.zh-CN.md":
        return root / "README.md"
    if path.is_relative_to(root / "docs" / "zh"):
        return root / "docs" / path.relative_to(root / "docs" / "zh")
    return None


def find_translation_problems(path: Path, *, root: Path) -> Iterator[str]:
    """Yield an error message for each difference between a translated page and its original."""
    original = get_original(path, root=root)
    if original is None:
        return
    name = path.relative_to(root)
    if not original.exists():
        yield f"{name}: no English page {original.relative_to(root)}"
        return
    text = path.read_text()
    if not links_to(text, original, folder=path.parent):
        yield f"{name}: no link to its English page {original.relative_to(root)}"
    blocks, original_blocks = read_code_blocks(text), read_code_blocks(original.read_text())
    for block, original_block in zip_longest(blocks, original_blocks):
        if block is None or original_block is None:
            yield f"{name}: {len(blocks)} code blocks; {original.relative_to(root)} has {len(original_blocks)}"
        elif difference := describe_difference(block, original_block):
            yield f"{name}:{block.line}: {difference} of {original.relative_to(root)}:{original_block.line}"
        else:
            continue
        return  # later blocks would be compared with the wrong ones


def links_to(text: str, target: Path, *, folder: Path) -> bool:
    """Return whether a page in `folder` contains a relative link to the target."""
    return any((folder / link.partition("#")[0]).resolve() == target.resolve() for link in LINK.findall(text))


def read_code_blocks(text: str) -> tuple[CodeBlock, ...]:
    """Return all fenced code blocks of a page."""
    return tuple(
        CodeBlock(
            text.count("\n", 0, match.start()) + 1,
            match["language"].strip(),
            tuple(_COMMENT.sub(r"\1#", line) for line in match["content"].splitlines()),
        )
        for match in BLOCK.finditer(text)
    )


def describe_difference(block: CodeBlock, original: CodeBlock) -> str | None:
    """Return the first difference between two blocks, or None if they are equal except for comments."""
    if block.language != original.language:
        return f"code block in language {block.language!r} instead of {original.language!r}"
    for line, original_line in zip_longest(block.lines, original.lines):
        if line != original_line:
            return f"code block has the line {line!r} instead of {original_line!r}"
    return None
