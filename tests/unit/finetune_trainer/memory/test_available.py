"""Test the memory limit that applies to a container: the tightest cgroup limit above its processes."""

from pathlib import Path

import pytest

from finetune_trainer.memory.available import host_memory_bytes

KIB = 2**10


@pytest.fixture
def physical_bytes(tmp_path: Path) -> int:
    """Memory of a host without any cgroup limit."""
    return host_memory_bytes(tmp_path / "cgroups", tmp_path / "no file")


def write_limits(cgroups: Path, **by_folder: str) -> None:
    """Write memory.max of each cgroup; `user_own` stands for the path user/own."""
    for folder, limit in by_folder.items():
        (cgroups / folder.replace("_", "/")).mkdir(parents=True, exist_ok=True)
        (cgroups / folder.replace("_", "/") / "memory.max").write_text(f"{limit}\n")


def test_the_limit_of_a_container_is_read_from_the_root_cgroup(tmp_path: Path, physical_bytes: int) -> None:
    (tmp_path / "membership").write_text("0::/\n")
    (tmp_path / "cgroups").mkdir()
    (tmp_path / "cgroups/memory.max").write_text("4096\n")

    assert host_memory_bytes(tmp_path / "cgroups", tmp_path / "membership") == 4 * KIB < physical_bytes


def test_the_tightest_limit_of_all_parent_cgroups_applies(tmp_path: Path, physical_bytes: int) -> None:
    (tmp_path / "membership").write_text("4:memory:/elsewhere\n0::/user/own\n")
    write_limits(tmp_path / "cgroups", user="2048", user_own="max", elsewhere="1024")

    assert host_memory_bytes(tmp_path / "cgroups", tmp_path / "membership") == 2 * KIB < physical_bytes


def test_without_a_limit_the_physical_memory_applies(tmp_path: Path, physical_bytes: int) -> None:
    (tmp_path / "membership").write_text("0::/user\n")
    write_limits(tmp_path / "cgroups", user="max")

    assert host_memory_bytes(tmp_path / "cgroups", tmp_path / "membership") == physical_bytes


def test_a_limit_above_the_physical_memory_is_ignored(tmp_path: Path, physical_bytes: int) -> None:
    (tmp_path / "membership").write_text("0::/user\n")
    write_limits(tmp_path / "cgroups", user=str(2 * physical_bytes))

    assert host_memory_bytes(tmp_path / "cgroups", tmp_path / "membership") == physical_bytes
