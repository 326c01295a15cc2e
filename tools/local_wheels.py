"""Wheels in local folders, such as torch without CUDA: their sha256 must be in a lock file.

It uses only the standard library, like `environment.py`.
"""

import hashlib
import platform
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from lockfile import LockedPackage, normalise_name, read_locks

TORCH_LOCKS = ("torch", "torch-cpu")


class UnknownWheel(Exception):
    """Raised for a local wheel of a locked version whose sha256 is in no lock file; the message names the file."""


def find_wheel_folders(checkout: Path, environment: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the folders with wheels: those in PIP_FIND_LINKS, and `shared/wheels` next to the checkout."""
    folders = [Path(word) for word in shlex.split(environment.get("PIP_FIND_LINKS", ""))]
    return tuple(folder for folder in (*folders, checkout.parent / "shared" / "wheels") if any(folder.glob("*.whl")))


def verify_local_wheels(folders: Iterable[Path], packages: Sequence[LockedPackage]) -> None:
    """Compare the wheels that could satisfy a locked version with the hashes of their package.

    A version with a local label, such as 2.13.0+cpu, also satisfies a requirement of the version without it.

    Raises: UnknownWheel
    """
    for wheel in (wheel for folder in folders for wheel in sorted(folder.glob("*.whl"))):
        name, version = _read_name_and_version(wheel)
        locked = [package for package in packages if package.name == name]
        if not {version, version.partition("+")[0]} & {package.version for package in locked}:
            continue
        with wheel.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        if not any(digest in package.hashes for package in locked):
            expected = [value for package in locked if package.version == version for value in package.hashes]
            raise UnknownWheel(_describe(wheel, f"{name}=={version}", digest=digest, expected=expected))


def select_torch_lock(folders: Iterable[Path], *, python: tuple[int, int], chosen: str = "") -> str:
    """Return the lock file of torch: `torch-cpu` if a folder contains its wheel for this Python, else `torch`.

    chosen: name of the lock file to use instead, or an empty string

    Raises: ValueError if `chosen` is not a lock file of torch
    """
    if chosen:
        if chosen not in TORCH_LOCKS:
            raise ValueError(f"TORCH: found {chosen!r}; set it to one of {', '.join(TORCH_LOCKS)}, or leave it empty")
        return chosen
    (cpu_torch,) = read_locks(("torch-cpu",))
    pattern = f"torch-{cpu_torch.version}-cp{python[0]}{python[1]}-*{platform.machine()}.whl"
    return "torch-cpu" if any(any(folder.glob(pattern)) for folder in folders) else "torch"


def _read_name_and_version(wheel: Path) -> tuple[str, str]:
    name, _, rest = wheel.stem.partition("-")
    return normalise_name(name), rest.partition("-")[0]


def _describe(wheel: Path, requirement: str, *, digest: str, expected: Sequence[str]) -> str:
    known = f"expected {' or '.join(expected[:3])}" if expected else f"{requirement} is in no lock file"
    return (
        f"{wheel}: found sha256 {digest}, {known}; delete the file, or, if you trust it,"
        f" add --hash=sha256:{digest} to the line {requirement} in requirements/"
    )
