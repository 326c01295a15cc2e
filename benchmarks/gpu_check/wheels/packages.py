"""The packages that a machine with PyTorch lacks, in the versions of the lock files, and a check of their requirements.

`machine_packages.txt` contains what the machine is expected to have.
"""

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from email.parser import Parser
from itertools import chain
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement

from lockfile import LockedPackage, normalise_name, read_locks

MACHINE_PACKAGES = Path(__file__).with_name("machine_packages.txt")
PYTHON_VERSION = "3.12"
LOCK_NAMES = ("trainer", "cli", "dev")
# The machine may have older versions of the first group, and lacks the others.
NAMES = (
    *("transformers", "peft", "typing-extensions", "safetensors"),
    *("httpx2", "httpcore2", "truststore"),
    *("pydantic", "pydantic-core", "annotated-types", "typing-inspection", "google-re2"),
    *("trl", "datasets", "multiprocess", "dill"),
    *("deepspeed", "hjson", "bitsandbytes"),
    "nvidia-ml-py",
)
# Requirements that the GPU check does not use: of other packages, and of this project for videos, pushes, clusters and
# the conversion of commands.
UNUSED_REQUIREMENTS = frozenset(
    {"tensorboard", "av", "modelscope-hub", "kubernetes", "tree-sitter", "tree-sitter-bash"}
)
PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"
PROJECT_EXTRAS = ("trainer", "cli")
_MARKER_VALUES = {
    "python_version": PYTHON_VERSION,
    "python_full_version": f"{PYTHON_VERSION}.0",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "implementation_name": "cpython",
    "os_name": "posix",
    "extra": "",
}


@dataclass(frozen=True)
class UnmetRequirement:
    """A requirement of a wheel that neither the folder nor the machine meets."""

    package: str
    requirement: str
    found: str  # version, or an empty string

    def __str__(self) -> str:
        return f"{self.package} requires {self.requirement}; found {self.found or 'none'}"


def select_packages(names: Iterable[str] = NAMES) -> Iterator[LockedPackage]:
    """Yield the locked package of each name for Python 3.12 on Linux. Raises: KeyError if a name is not locked."""
    locked: dict[str, LockedPackage] = {}
    for package in read_locks(LOCK_NAMES):
        if _applies(Requirement(package.requirement)):
            locked.setdefault(package.name, package)
    yield from (locked[name] for name in names)


def read_machine_packages(file: Path = MACHINE_PACKAGES) -> dict[str, str]:
    """Return the expected versions by name; the version is empty if every version will do."""
    lines = (line.partition("#")[0].strip() for line in file.read_text().splitlines())
    pairs = (line.partition("==") for line in lines if line)
    return {normalise_name(name): version for name, _, version in pairs}


def find_unmet_requirements(wheels: Iterable[Path], machine: Mapping[str, str]) -> list[UnmetRequirement]:
    """Compare the requirements of the wheels with the wheels and the packages of the machine."""
    metadata = {normalise_name(name): (version, required) for name, version, required in map(read_metadata, wheels)}
    versions = {**machine, **{name: version for name, (version, _) in metadata.items()}}
    return [
        UnmetRequirement(name, str(requirement), versions.get(normalise_name(requirement.name), ""))
        for name, (_, required) in metadata.items()
        for requirement in map(Requirement, required)
        if _applies(requirement) and requirement.name not in UNUSED_REQUIREMENTS and not _is_met(requirement, versions)
    ]


def find_missing_packages(wheels: Iterable[Path], machine: Mapping[str, str]) -> list[UnmetRequirement]:
    """Return the requirements of this project, in any version, that neither the wheels nor the machine contain."""
    found = machine.keys() | {normalise_name(read_metadata(wheel)[0]) for wheel in wheels}
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    extras = (project["optional-dependencies"][extra] for extra in PROJECT_EXTRAS)
    requirements = map(Requirement, chain(project["dependencies"], *extras))
    return [
        UnmetRequirement(project["name"], str(requirement), "")
        for requirement in requirements
        if normalise_name(requirement.name) not in found | UNUSED_REQUIREMENTS
    ]


def read_metadata(wheel: Path) -> tuple[str, str, list[str]]:
    """Return name, version and requirements of a wheel."""
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        headers = Parser().parsestr(archive.read(name).decode(), headersonly=True)
    return headers["Name"], headers["Version"], headers.get_all("Requires-Dist") or []


def _applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate(_MARKER_VALUES)


def _is_met(requirement: Requirement, versions: Mapping[str, str]) -> bool:
    version = versions.get(normalise_name(requirement.name))
    return version is not None and (not version or requirement.specifier.contains(version, prereleases=True))
