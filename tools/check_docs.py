"""Check that links, anchors and tests named in all Markdown files exist and that prose is wrapped.

Links to files outside docs/ are absolute URLs of the repository, so that they work on the documentation site; the check
also verifies their paths.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = re.compile(r"https://github\.com/finetune-operator/finetune-operator/(?:blob|tree)/main/")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
TEST_NAME = re.compile(r"`(test_[a-z0-9_]+)`")
UNWRAPPED = ("|", "<!--", "[", "#")  # tables, comments, link definitions and headings cannot be wrapped
MAX_WIDTH = 110


def main() -> int:
    """Print all problems and return exit code 1 if there are any."""
    problems = [
        problem
        for path in list_markdown_files()
        for check in (find_broken_links, find_missing_tests, find_long_lines)
        for problem in check(path)
    ]
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
            yield f"{path.relative_to(ROOT)}: {link}: {target.relative_to(ROOT)} has no heading #{anchor}"


def find_missing_tests(path: Path) -> Iterator[str]:
    """Yield an error message for each test that a page names and that does not exist."""
    for name in TEST_NAME.findall(path.read_text()):
        if name not in list_tests():
            yield f"{path.relative_to(ROOT)}: {name}: no such test; name a function or module in tests/"


def find_long_lines(path: Path) -> Iterator[str]:
    """Yield an error message for each line of prose longer than MAX_WIDTH, except in generated text."""
    prose = path.read_text().partition("<!-- Generated")[0]
    text = FENCE.sub(lambda block: "\n" * block[0].count("\n"), prose)
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > MAX_WIDTH and not line.startswith(UNWRAPPED):
            yield f"{path.relative_to(ROOT)}:{number}: {len(line)} characters; wrap prose at {MAX_WIDTH}"


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
    """Return the anchors that repository hosts derive from a page's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)


if __name__ == "__main__":
    sys.exit(main())
