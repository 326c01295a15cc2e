"""Test that a container's memory limit is the lowest limit of its cgroup and all parent cgroups."""

from pathlib import Path

import pytest

from finetune_trainer.cgroup import Cgroup
from finetune_trainer.memory.available import read_host_memory_limit

KIB = 2**10


@pytest.fixture
def physical_bytes(tmp_path: Path) -> int:
    """Return the physical memory of the host."""
    return read_host_memory_limit(Cgroup(tmp_path / "cgroups", tmp_path / "no file"))


def write_limits(cgroup_root: Path, **limits: str) -> None:
    """Write a memory.max file for each cgroup; `user_own` stands for the path user/own."""
    for folder, limit in limits.items():
        (cgroup_root / folder.replace("_", "/")).mkdir(parents=True, exist_ok=True)
        (cgroup_root / folder.replace("_", "/") / "memory.max").write_text(f"{limit}\n")


def test_container_limit_is_read_from_the_root_cgroup(tmp_path: Path, physical_bytes: int) -> None:
    (tmp_path / "membership").write_text("0::/\n")
    (tmp_path / "cgroups").mkdir()
    (tmp_path / "cgroups/memory.max").write_text("4096\n")

    assert read_host_memory_limit(Cgroup(tmp_path / "cgroups", tmp_path / "membership")) == 4 * KIB < physical_bytes


def test_lowest_limit_of_the_cgroup_and_its_parents_applies(tmp_path: Path, physical_bytes: int) -> None:
    (tmp_path / "membership").write_text("4:memory:/elsewhere\n0::/user/own\n")
    write_limits(tmp_path / "cgroups", user="2048", user_own="max", elsewhere="1024")

    assert read_host_memory_limit(Cgroup(tmp_path / "cgroups", tmp_path / "membership")) == 2 * KIB < physical_bytes


def test_physical_memory_applies_without_a_limit(tmp_path: Path, physical_bytes: int) -> None:
    (tmp_path / "membership").write_text("0::/user\n")
    write_limits(tmp_path / "cgroups", user="max")

    assert read_host_memory_limit(Cgroup(tmp_path / "cgroups", tmp_path / "membership")) == physical_bytes


def test_limit_above_physical_memory_is_ignored(tmp_path: Path, physical_bytes: int) -> None:
    (tmp_path / "membership").write_text("0::/user\n")
    write_limits(tmp_path / "cgroups", user=str(2 * physical_bytes))

    assert read_host_memory_limit(Cgroup(tmp_path / "cgroups", tmp_path / "membership")) == physical_bytes
