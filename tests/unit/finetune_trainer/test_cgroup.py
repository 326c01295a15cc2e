"""Test that the limits of a container are the lowest of its cgroup and all parent cgroups."""

from pathlib import Path

import pytest

from finetune_trainer.cgroup import Cgroup


def write_cgroup(folder: Path, *, membership: str, files: dict[str, str]) -> Cgroup:
    """Write a membership file and files of cgroups by their path below the root."""
    (folder / "membership").write_text(membership)
    for path, content in files.items():
        (folder / "cgroups" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "cgroups" / path).write_text(f"{content}\n")
    return Cgroup(folder / "cgroups", folder / "membership")


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        pytest.param({}, None, id="no file"),
        pytest.param({"pod/own/cpu.max": "max 100000"}, None, id="unlimited"),
        pytest.param({"pod/own/cpu.max": "150000 100000"}, 1.5, id="own quota"),
        pytest.param({"pod/cpu.max": "200000 50000", "pod/own/cpu.max": "max 100000"}, 4.0, id="quota of the parent"),
        pytest.param({"pod/cpu.max": "200000 100000", "pod/own/cpu.max": "800000 100000"}, 2.0, id="lowest quota"),
        pytest.param({"cpu.max": "300000 100000"}, 3.0, id="root of a container"),
        pytest.param({"elsewhere/cpu.max": "100000 100000"}, None, id="quota of another cgroup"),
    ],
)
def test_lowest_cpu_quota_applies(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    cgroup = write_cgroup(tmp_path, membership="4:cpu:/elsewhere\n0::/pod/own\n", files=files)

    assert cgroup.read_cpu_quota() == quota


def test_memory_limit_is_independent_of_the_cpu_quota(tmp_path: Path) -> None:
    cgroup = write_cgroup(
        tmp_path, membership="0::/pod\n", files={"pod/memory.max": "4096", "pod/cpu.max": "100000 100000"}
    )

    assert (cgroup.read_memory_limit(), cgroup.read_cpu_quota()) == (4096, 1.0)


def test_a_host_without_cgroups_has_no_limits(tmp_path: Path) -> None:
    cgroup = Cgroup(tmp_path / "none", tmp_path / "no file")

    assert (cgroup.read_memory_limit(), cgroup.read_cpu_quota()) == (None, None)
