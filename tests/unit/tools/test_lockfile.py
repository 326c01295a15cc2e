"""Tests of lock files, and of the project's lock files in requirements/."""

import tomllib
from collections import defaultdict
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from lock import EXTRAS, find_stale_torch, read_requirements
from lockfile import LOCKS, LockedPackage, normalise_name, parse_lock, read_locks

PYPROJECT = LOCKS.parent / "pyproject.toml"
FIRST, SECOND = "1" * 64, "2" * 64
LOCKS_BY_EXTRA = {
    "operator": ("operator",),
    "cli": ("cli",),
    "mcp": ("mcp",),
    "trainer": ("trainer", "torch"),
    "dev": ("operator", "cli", "mcp", "trainer", "torch", "dev"),
}


def test_rendered_lock_is_parsed_again() -> None:
    packages = (
        LockedPackage("av==18.1.0 ; python_full_version < '3.12'", (FIRST, SECOND)),
        LockedPackage("torch==2.13.0+cpu", (FIRST,)),
    )

    assert parse_lock("# comment\n" + "".join(package.render() for package in packages)) == packages
    assert [(package.name, package.version) for package in packages] == [("av", "18.1.0"), ("torch", "2.13.0+cpu")]


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("kopf==1.45.2", id="without hash"),
        pytest.param(f"kopf>=1.45.2 --hash=sha256:{FIRST}", id="without exact version"),
        pytest.param(f"kopf==1.45.2 --hash=sha256:{FIRST[1:]}", id="hash too short"),
        pytest.param(f"kopf==1.45.2 --hash=md5:{FIRST[:32]} --hash=sha256:{FIRST}", id="weak hash"),
        pytest.param("--index-url https://mirror.example/simple", id="index"),
    ],
)
def test_line_that_does_not_pin_version_and_hash_is_rejected(line: str) -> None:
    with pytest.raises(ValueError, match="exact version"):
        parse_lock(line)


def test_every_locked_package_has_hashes_and_no_lock_contains_an_address() -> None:
    count_by_lock = {path.stem: len(parse_lock(path.read_text())) for path in LOCKS.glob("*.txt")}

    assert count_by_lock.keys() == {*EXTRAS, "torch", "torch-cpu", "uv", "hatchling", "setuptools", "ms-swift"}
    assert 0 not in count_by_lock.values()
    assert [path.name for path in LOCKS.rglob("*.txt") if "://" in path.read_text()] == []


@pytest.mark.parametrize("extra", EXTRAS)
def test_locks_satisfy_every_requirement_of_an_extra(extra: str) -> None:
    packages = read_locks(LOCKS_BY_EXTRA[extra])

    requirements = [Requirement(line) for line in read_requirements(PYPROJECT)[extra]]

    assert len(requirements) >= 3
    assert [str(requirement) for requirement in requirements if not is_satisfied(requirement, packages)] == []


def is_satisfied(requirement: Requirement, packages: tuple[LockedPackage, ...]) -> bool:
    versions = [package.version for package in packages if package.name == normalise_name(requirement.name)]
    return bool(versions) and all(requirement.specifier.contains(version) for version in versions)


def test_build_backend_of_the_project_is_locked() -> None:
    build_system = tomllib.loads(PYPROJECT.read_text())["build-system"]

    packages = read_locks(("hatchling",))

    assert [line for line in build_system["requires"] if not is_satisfied(Requirement(line), packages)] == []


def test_a_package_has_the_same_versions_in_all_locks() -> None:
    versions_by_name: defaultdict[str, set[frozenset[str]]] = defaultdict(set)
    for path in LOCKS.glob("*.txt"):
        if path.stem not in ("ms-swift", "torch-cpu"):
            packages = parse_lock(path.read_text())
            for name in {package.name for package in packages}:
                versions_by_name[name].add(frozenset(p.version for p in packages if p.name == name))

    assert len(versions_by_name) > 140
    assert [name for name, versions in versions_by_name.items() if len(versions) > 1] == []


def test_torch_without_gpu_libraries_has_the_version_of_torch() -> None:
    assert find_stale_torch(read_locks(("torch",)), read_locks(("torch-cpu",))) == []


def test_torch_without_gpu_libraries_of_another_version_is_reported() -> None:
    (problem,) = find_stale_torch(
        [LockedPackage("torch==2.14.0", (FIRST,))], [LockedPackage("torch==2.13.0+cpu", (SECOND,))]
    )

    assert problem.startswith("requirements/torch-cpu.txt: found torch==2.13.0+cpu; change it to 2.14.0")


def test_requirements_of_an_extra_include_those_of_the_project(tmp_path: Path) -> None:
    pyproject = tmp_path / "pyproject.toml"
    extras = "\n".join(f'{extra} = ["{extra}-library"]' for extra in EXTRAS)
    pyproject.write_text(f'[project]\ndependencies = ["pydantic"]\n[project.optional-dependencies]\n{extras}\n')

    assert read_requirements(pyproject)["cli"] == ("pydantic", "cli-library")
