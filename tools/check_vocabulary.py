"""Check that identifiers and docstrings use standard vocabulary and that class names are unique.

docs/glossary.md lists the terms to use. To allow an exception, add it to ALLOWED with a reason.
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
# words to avoid: functions return, messages report and fields contain values
BANNED_BY_THEME = {
    "speech": "tell tells told telling say says said saying hear hears heard unheard speak speaks spoke",
    "senses": "see sees seeing sight sighted thought wanted wish wishes asked answered obey obeys farewell",
    "homely": "stir stirs spared outlived outlives dice patience patient album sieve eye",
}
BANNED = frozenset(word for words in BANNED_BY_THEME.values() for word in words.split())
ALLOWED: dict[str, str] = {  # allowed identifiers ("identifier" or "path:identifier") with the reason
    "early_stopping_patience": "name in transformers and in the API",
}
ALLOWED_DUPLICATES: dict[str, str] = {}  # allowed duplicate class names with the reason


@dataclass(frozen=True)
class Problem:
    """A rule violation at a line of a file."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def main() -> int:
    """Print all rule violations and return exit code 1 if there are any."""
    trees = {path: ast.parse((ROOT / path).read_text()) for path in list_python_files()}
    problems = [problem for path, tree in trees.items() for problem in check_file(path, tree)]
    problems += check_class_names(trees)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


def list_python_files() -> list[str]:
    """Return the paths of all Python files that git does not ignore."""
    command = ("git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py")
    listed_paths = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return sorted(path for path in set(listed_paths) if (ROOT / path).exists())


def check_file(path: str, tree: ast.Module) -> Iterator[Problem]:
    """Yield the problems of a file, at most one per identifier."""
    reported_names: set[str] = set()
    for name, line in list_identifiers(tree):
        words = find_banned_words(name)
        if words and name not in reported_names and not is_allowed(path, name):
            reported_names.add(name)
            yield Problem(path, line, f"identifier {name}: avoid {', '.join(words)}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from check_docstring(path, node)


def list_identifiers(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield all names that a file defines, including parameters and attributes, with their lines."""
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
    """Check that the first paragraph contains no banned words and, for public names, at least five words."""
    docstring = ast.get_docstring(node)
    if docstring is None:
        return
    name = getattr(node, "name", "module")
    first_paragraph = re.sub(r"`[^`]*`", "x", docstring.split("\n\n")[0])
    words = re.findall(r"[a-z]+", first_paragraph.lower())
    banned_words = sorted(BANNED.intersection(words))
    line = getattr(node, "lineno", 1)
    if banned_words and not is_allowed(path, name):
        yield Problem(path, line, f"docstring of {name}: avoid {', '.join(banned_words)}")
    is_public = path.startswith(PRODUCT) and not name.startswith("_") and not isinstance(node, ast.Module)
    if is_public and len(first_paragraph.split()) < MIN_DOCSTRING_WORDS:
        yield Problem(
            path, line, f"docstring of {name} has fewer than {MIN_DOCSTRING_WORDS} words: {first_paragraph!r}"
        )


def check_class_names(trees: dict[str, ast.Module]) -> Iterator[Problem]:
    """Check that no class name is defined twice."""
    locations_by_name: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                locations_by_name[node.name].append((path, node.lineno))
    for name, locations in locations_by_name.items():
        if len(locations) > 1 and name not in ALLOWED_DUPLICATES:
            other_paths = ", ".join(path for path, _ in locations[1:])
            yield Problem(*locations[0], f"class {name} is also defined in {other_paths}")


def find_banned_words(name: str) -> list[str]:
    """Return the banned words in a snake_case or CamelCase identifier."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)
    return sorted(BANNED.intersection(word.lower() for word in words))


def is_allowed(path: str, name: str) -> bool:
    """Return whether ALLOWED lists the name, for all files or for this file."""
    return name in ALLOWED or f"{path}:{name}" in ALLOWED


if __name__ == "__main__":
    sys.exit(main())
