"""Tests of the CPU limit on fake cgroup v1 and v2 hierarchies."""

from pathlib import Path

from testing.cluster.host.cgroups import set_cpu_limit


def create_cgroup_v1(root: Path) -> Path:
    for name in ("cpu", "cpuset", "memory", "pids"):
        (root / name / "node").mkdir(parents=True)
    (root / "cpuacct").symlink_to("cpu")
    return root


def create_cgroup_v2(root: Path) -> Path:
    (root / "node").mkdir()
    (root / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    return root


def test_cpu_limit_is_written_as_quota_per_100_ms_and_removed(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one, two = create_cgroup_v1(tmp_path / "one"), create_cgroup_v2(tmp_path / "two")

    set_cpu_limit("node", cores=0.5, root=one)
    set_cpu_limit("node", cores=0.5, root=two)
    quotas = ((one / "cpu/node/cpu.cfs_quota_us").read_text(), (two / "node/cpu.max").read_text())
    set_cpu_limit("node", cores=None, root=one)
    set_cpu_limit("node", cores=None, root=two)
    removed = ((one / "cpu/node/cpu.cfs_quota_us").read_text(), (two / "node/cpu.max").read_text())

    assert quotas == ("50000", "50000 100000")
    assert removed == ("-1", "max 100000")
