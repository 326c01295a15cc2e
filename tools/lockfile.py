"""Lock files: requirements files in which each package has an exact version and the sha256 of its artefacts.

It uses only the standard library, like `environment.py`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

LOCKS = Path(__file__).resolve().parent.parent / "requirements"
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})(?=\s|$)")


@dataclass(frozen=True)
class LockedPackage:
    """One package of a lock file: a pinned requirement, with its marker, and its sha256 hashes in hexadecimal."""

    requirement: str
    hashes: tuple[str, ...]

    @property
    def name(self) -> str:
        return normalise_name(self.requirement.partition("==")[0])

    @property
    def version(self) -> str:
        return self.requirement.partition(";")[0].partition("==")[2].strip()

    def render(self) -> str:
        return " \\\n    ".join((self.requirement, *(f"--hash=sha256:{value}" for value in self.hashes))) + "\n"


def normalise_name(name: str) -> str:
    """Return the name of a package as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def parse_lock(text: str) -> tuple[LockedPackage, ...]:
    """Return the packages of a lock file.

    Raises: ValueError if a line is neither a comment nor a version pinned with `==` and hashes
    """
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return tuple(_parse_line(line) for line in "\n".join(lines).replace("\\\n", " ").splitlines() if line.strip())


def _parse_line(line: str) -> LockedPackage:
    requirement = HASH.sub("", line).strip()
    hashes = tuple(HASH.findall(line))
    if "==" not in requirement or "--" in requirement or not hashes:
        raise ValueError(f"{line[:100]!r}: a locked package has an exact version and at least one sha256 hash")
    return LockedPackage(requirement, hashes)


def read_locks(names: Iterable[str] = ("*",)) -> tuple[LockedPackage, ...]:
    """Return the packages of the project's lock files with these names (default: of all)."""
    paths = [path for name in names for path in sorted(LOCKS.glob(f"{name}.txt"))]
    return tuple(package for path in paths for package in parse_lock(path.read_text()))
