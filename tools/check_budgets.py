"""Check that the lines of Python per group of folders, and the modules per product folder, stay within budgets.toml."""

import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TABLE = "budgets.toml"


def main() -> int:
    """Print each budget that is exceeded, and return exit code 1 if there are any."""
    listed = subprocess.run(("git", "ls-files", "*.py"), cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = {path: len((ROOT / path).read_bytes().splitlines()) for path in listed.split() if (ROOT / path).exists()}
    problems = list(find_excesses(tomllib.loads((ROOT / TABLE).read_text()), lines))
    for problem in problems:
        print(f"{TABLE}: {problem}; remove or merge something, or raise the budget in a decision")
    return 1 if problems else 0


def find_excesses(budgets: Mapping[str, Any], lines: Mapping[str, int]) -> Iterator[str]:
    """Yield a message for each group of folders with too many lines, and each product folder with too many modules.

    budgets: the table. lines: number of lines of each Python file, by its path in the repository.
    """
    for group, budget in budgets["lines"].items():
        found = sum(count for path, count in lines.items() if PurePath(path).parts[0] in budget["folders"])
        if found > budget["limit"]:
            yield f"{group} has {found:,} lines of Python, and {budget['limit']:,} are allowed"
    exceptions = budgets["modules"]["exceptions"]
    for folder, found in count_modules(path for path in lines if is_product(path, budgets)).items():
        if found > (limit := exceptions.get(folder, budgets["modules"]["limit"])):
            yield f"{folder} has {found} modules, and {limit} are allowed"


def is_product(path: str, budgets: Mapping[str, Any]) -> bool:
    """Return whether a file belongs to the product."""
    return PurePath(path).parts[0] in budgets["lines"]["product"]["folders"]


def count_modules(paths: Iterable[str]) -> Counter[str]:
    """Return the number of modules of each folder, without `__init__`."""
    return Counter(str(PurePath(path).parent) for path in paths if PurePath(path).name != "__init__.py")


if __name__ == "__main__":
    sys.exit(main())
