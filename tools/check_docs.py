"""Check all Markdown files: relative links exist, anchors are headings of their page, prose is wrapped.

A link to a file outside of docs/ is absolute, so that it also works on the documentation site; its path is checked too.
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
UNWRAPPED = ("|", "<!--", "[", "#")  # tables, comments, rows of links and headings cannot be wrapped
MAX_WIDTH = 110


def main() -> int:
    """Exit code 1 if a link is broken or a line of prose is too long."""
    problems = [problem for path in markdown_files() for check in (broken_links, long_lines) for problem in check(path)]
    for problem in problems:
        print(problem)
    return 1 if problems else 0


def markdown_files() -> list[Path]:
    """All Markdown files that git tracks or would track."""
    command = ("git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md")
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return sorted(ROOT / path for path in set(listed) if path and (ROOT / path).exists())


def broken_links(path: Path) -> Iterator[str]:
    """One line per broken link of a page: file, link and what is missing."""
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
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            yield f"{path.relative_to(ROOT)}: {link}: {target.relative_to(ROOT)} has no heading #{anchor}"


def long_lines(path: Path) -> Iterator[str]:
    """One line per line of prose that is longer than MAX_WIDTH; generated text is not wrapped."""
    written = path.read_text().partition("<!-- Generated")[0]
    text = FENCE.sub(lambda block: "\n" * block[0].count("\n"), written)
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > MAX_WIDTH and not line.startswith(UNWRAPPED):
            yield f"{path.relative_to(ROOT)}:{number}: {len(line)} characters; wrap prose at {MAX_WIDTH}"


@cache
def anchors(path: Path) -> frozenset[str]:
    """The anchors of a page's headings, as repository hosts derive them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)


if __name__ == "__main__":
    sys.exit(main())
