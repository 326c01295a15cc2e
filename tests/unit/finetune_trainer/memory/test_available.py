"""How much memory a container has: the tightest limit above it."""

from pathlib import Path

import pytest

from finetune_trainer.memory.available import host_memory

KIB = 2**10


@pytest.fixture
def machine(tmp_path: Path) -> int:
    """Without any limit."""
    return host_memory(tmp_path / "cgroups", tmp_path / "no file")


def limit(cgroups: Path, **by_folder: str) -> None:
    for folder, said in by_folder.items():
        (cgroups / folder.replace("_", "/")).mkdir(parents=True, exist_ok=True)
        (cgroups / folder.replace("_", "/") / "memory.max").write_text(f"{said}\n")


def test_a_container_sees_its_own_limit_at_the_root(tmp_path: Path, machine: int) -> None:
    (tmp_path / "membership").write_text("0::/\n")
    (tmp_path / "cgroups").mkdir()
    (tmp_path / "cgroups/memory.max").write_text("4096\n")

    assert host_memory(tmp_path / "cgroups", tmp_path / "membership") == 4 * KIB < machine


def test_the_tightest_limit_above_a_process_counts(tmp_path: Path, machine: int) -> None:
    (tmp_path / "membership").write_text("4:memory:/elsewhere\n0::/user/own\n")
    limit(tmp_path / "cgroups", user="2048", user_own="max", elsewhere="1024")

    assert host_memory(tmp_path / "cgroups", tmp_path / "membership") == 2 * KIB < machine


def test_no_limit_is_what_the_machine_has(tmp_path: Path, machine: int) -> None:
    (tmp_path / "membership").write_text("0::/user\n")
    limit(tmp_path / "cgroups", user="max")

    assert host_memory(tmp_path / "cgroups", tmp_path / "membership") == machine


def test_a_limit_beyond_the_machine_is_none(tmp_path: Path, machine: int) -> None:
    (tmp_path / "membership").write_text("0::/user\n")
    limit(tmp_path / "cgroups", user=str(2 * machine))

    assert host_memory(tmp_path / "cgroups", tmp_path / "membership") == machine
