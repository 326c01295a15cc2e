"""Check that links, anchors and tests named in all Markdown files exist and that prose is wrapped.

A table whose last column is named "test" contains statements; each of its rows names a test that proves it.
Links to files outside docs/ are absolute URLs of the repository, so that they work on the documentation site; the check
also verifies their paths. Chinese pages are compared with their English pages (translations.py).
"""

import re
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

from translations import LINK, find_translation_problems

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = re.compile(r"https://github\.com/finetune-operator/finetune-operator/(?:blob|tree)/main/")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
TEST_NAME = re.compile(r"`(test_[a-z0-9_]+)`")
UNWRAPPED = ("|", "<!--", "[", "#")  # tables, comments, link definitions and headings cannot be wrapped
MARKUP = re.compile(r"\[([^\]]*)\]\([^)\s]+\)|\*\*")  # links, which leave their text, and bold text
LINE_START = re.compile(r"\s*(?:[-*] |\d+\. |[|#]|<!--)")  # of a line that does not continue the paragraph before it
MAX_WIDTH = 110  # columns; a Chinese character has two


def main() -> int:
    """Print all problems and return exit code 1 if there are any."""
    problems = [
        problem
        for path in list_markdown_files()
        for check in (
            find_broken_links,
            find_missing_tests,
            find_unproven_statements,
            find_long_lines,
            find_breaks_in_chinese_text,
        )
        for problem in check(path)
    ]
    problems += [problem for path in list_markdown_files() for problem in find_translation_problems(path, root=ROOT)]
    for problem in problems:
        print(problem)
    return 1 if problems else 0


def list_markdown_files() -> list[Path]:
    """Return all Markdown files that git does not ignore."""
    command = ("git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md")
    listed_paths = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return sorted(ROOT / path for path in set(listed_paths) if path and (ROOT / path).exists())


def find_broken_links(path: Path) -> Iterator[str]:
    """Yield an error message for each broken link of a page."""
    for link in LINK.findall(FENCE.sub("", path.read_text())):
        name, _, anchor = link.partition("#")
        if REPOSITORY.match(link):
            target = ROOT / REPOSITORY.sub("", name)
        elif link.startswith(("http://", "https://", "mailto:")):
            continue
        else:
            target = (path.parent / name).resolve() if name else path
        if not target.exists():
            yield f"{path.relative_to(ROOT)}: {link}: no such file"
        elif anchor and target.suffix == ".md" and anchor not in list_anchors(target):
            yield f"{path.relative_to(ROOT)}: {link}: {target.relative_to(ROOT)} has no anchor #{anchor}"


def find_missing_tests(path: Path) -> Iterator[str]:
    """Yield an error message for each test that a page names and that does not exist."""
    for name in TEST_NAME.findall(path.read_text()):
        if name not in list_tests():
            yield f"{path.relative_to(ROOT)}: {name}: no such test; name a function or module in tests/"


def find_unproven_statements(path: Path) -> Iterator[str]:
    """Yield an error message for each row of a table of statements that names no test."""
    has_tests = False
    for number, line in enumerate(read_prose(path), 1):
        cells = [cell.strip() for cell in line.strip()[1:-1].split("|")] if line.startswith("|") else []
        if not cells:
            has_tests = False
        elif cells[-1] == "test":
            has_tests = True
        elif has_tests and set(line) - set("|-: ") and not TEST_NAME.search(cells[-1]):
            yield f"{path.relative_to(ROOT)}:{number}: no test for {cells[0]!r}; name one in the last column"


def find_long_lines(path: Path) -> Iterator[str]:
    """Yield an error message for each line of prose longer than MAX_WIDTH, except in generated text."""
    for number, line in enumerate(read_prose(path), 1):
        width = sum(2 if is_wide(character) else 1 for character in line)
        if width > MAX_WIDTH and not line.startswith(UNWRAPPED):
            yield f"{path.relative_to(ROOT)}:{number}: {width} columns; wrap prose at {MAX_WIDTH}"


def find_breaks_in_chinese_text(path: Path) -> Iterator[str]:
    """Yield an error message for each line break where Chinese text has no space, because browsers display one."""
    lines = MARKUP.sub(r"\1", "\n".join(read_prose(path))).split("\n")
    for number, (line, next_line) in enumerate(pairwise(lines), 1):
        before, after = line[-1:], next_line.lstrip()[:1]
        if not before or not after or line.startswith(UNWRAPPED) or LINE_START.match(next_line):
            continue
        is_beside_mark = any(is_wide(mark) and unicodedata.category(mark).startswith("P") for mark in (before, after))
        if is_beside_mark or (is_wide(before) and is_wide(after)):
            yield f"{path.relative_to(ROOT)}:{number}: line break between {before} and {after}; break lines at spaces"


def read_prose(path: Path) -> list[str]:
    """Return the lines of a page, with empty lines in place of code blocks, up to the generated part."""
    prose = path.read_text().partition("<!-- Generated")[0]
    return FENCE.sub(lambda block: "\n" * block[0].count("\n"), prose).splitlines()


def is_wide(character: str) -> bool:
    """Return whether a character has two columns in a terminal."""
    return unicodedata.east_asian_width(character) in "WF"


@cache
def list_tests() -> frozenset[str]:
    """Return the names of all test functions and test modules."""
    paths = list((ROOT / "tests").rglob("test_*.py"))
    functions = (
        name for path in paths for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    )
    return frozenset((*functions, *(path.stem for path in paths)))


@cache
def list_anchors(path: Path) -> frozenset[str]:
    """Return the anchors of a page: those that it declares, and those that repository hosts derive from headings."""
    text = FENCE.sub("", path.read_text())
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    derived = (re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)
    return frozenset((*derived, *re.findall(r'<a id="([\w-]+)">', text)))


if __name__ == "__main__":
    sys.exit(main())
