"""Check the words of identifiers and docstrings: no private vocabulary, docstrings on public names, unique class names.

The rules come from docs/glossary.md. To allow an exception, add it to ALLOWED with a reason.
"""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("operator/", "trainer/")
MIN_DOCSTRING_WORDS = 5
# A function returns, a message reports, a field contains: docs/glossary.md names the terms to use instead.
BANNED_BY_THEME = {
    "speech": "tell tells told telling say says said saying hear hears heard unheard speak speaks spoke",
    "senses": "see sees seeing sight sighted thought wanted wish wishes asked answered obey obeys farewell",
    "homely": "stir stirs spared outlived outlives dice patience patient album sieve eye",
}
BANNED = frozenset(word for words in BANNED_BY_THEME.values() for word in words.split())
ALLOWED: dict[str, str] = {  # "path:identifier" or "identifier" -> reason
    "early_stopping_patience": "name in transformers and in the API",
}
ALLOWED_DUPLICATES: dict[str, str] = {}  # class name -> reason


@dataclass(frozen=True)
class Problem:
    """One violation, at a line of a file."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def main() -> int:
    """Exit code 1 if any file violates a rule."""
    trees = {path: ast.parse((ROOT / path).read_text()) for path in tracked_files()}
    problems = [problem for path, tree in trees.items() for problem in check_file(path, tree)]
    problems += check_class_names(trees)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


def tracked_files() -> list[str]:
    """Paths of all Python files that git tracks or would track."""
    command = ("git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py")
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return sorted(path for path in set(listed) if (ROOT / path).exists())


def check_file(path: str, tree: ast.Module) -> Iterator[Problem]:
    """Problems of one file, at most one per identifier."""
    reported: set[str] = set()
    for name, line in identifiers(tree):
        words = banned_words(name)
        if words and name not in reported and not is_allowed(path, name):
            reported.add(name)
            yield Problem(path, line, f"identifier {name}: avoid {', '.join(words)}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from check_docstring(path, node)


def identifiers(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every name that the file defines: modules aside, also parameters and attributes of self."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node.lineno
            case ast.arg():
                yield node.arg, node.lineno
            case ast.Name(ctx=ast.Store()):
                yield node.id, node.lineno
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr, node.lineno


def check_docstring(
    path: str, node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
) -> Iterator[Problem]:
    """The first paragraph avoids the banned words; a public one of the product has at least five words."""
    docstring = ast.get_docstring(node)
    if docstring is None:
        return
    name = getattr(node, "name", "module")
    first = re.sub(r"`[^`]*`", "x", docstring.split("\n\n")[0])
    words = re.findall(r"[a-z]+", first.lower())
    banned = sorted(BANNED.intersection(words))
    line = getattr(node, "lineno", 1)
    if banned and not is_allowed(path, name):
        yield Problem(path, line, f"docstring of {name}: avoid {', '.join(banned)}")
    public = path.startswith(PRODUCT) and not name.startswith("_") and not isinstance(node, ast.Module)
    if public and len(first.split()) < MIN_DOCSTRING_WORDS:
        yield Problem(path, line, f"docstring of {name} has fewer than {MIN_DOCSTRING_WORDS} words: {first!r}")


def check_class_names(trees: dict[str, ast.Module]) -> Iterator[Problem]:
    """Every class name has one meaning in the whole tree."""
    places: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append((path, node.lineno))
    for name, defined in places.items():
        if len(defined) > 1 and name not in ALLOWED_DUPLICATES:
            others = ", ".join(path for path, _ in defined[1:])
            yield Problem(*defined[0], f"class {name} is also defined in {others}")


def banned_words(name: str) -> list[str]:
    """Words of a snake_case or CamelCase identifier that are banned."""
    parts = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)
    return sorted(BANNED.intersection(part.lower() for part in parts))


def is_allowed(path: str, name: str) -> bool:
    """Whether the name is an exception, everywhere or in this file."""
    return name in ALLOWED or f"{path}:{name}" in ALLOWED


if __name__ == "__main__":
    sys.exit(main())
