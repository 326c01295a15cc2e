"""The two versions of cgroups, by the files they show."""

from pathlib import Path

from testing.cluster.host.cgroups import hierarchies, missing_controllers, set_cpu_limit


def version_one(root: Path) -> Path:
    for name in ("cpu", "cpuset", "memory", "pids"):
        (root / name / "node").mkdir(parents=True)
    (root / "cpuacct").symlink_to("cpu")
    return root


def version_two(root: Path) -> Path:
    (root / "node").mkdir()
    (root / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    return root


def test_version_one_has_a_tree_per_controller_and_none_per_link(tmp_path: Path) -> None:
    root = version_one(tmp_path)

    assert [path.name for path in hierarchies(root)] == ["cpu", "cpuset", "memory", "pids"]
    assert missing_controllers(root) == ()


def test_version_two_is_one_tree(tmp_path: Path) -> None:
    root = version_two(tmp_path)

    assert hierarchies(root) == (root,)
    assert missing_controllers(root) == ()


def test_a_missing_controller_is_named(tmp_path: Path) -> None:
    root = version_two(tmp_path)
    (root / "cgroup.controllers").write_text("cpu memory\n")

    assert missing_controllers(root) == ("cpuset", "pids")


def test_a_limit_is_a_share_of_every_tenth_of_a_second_and_can_be_lifted(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one, two = version_one(tmp_path / "one"), version_two(tmp_path / "two")

    set_cpu_limit("node", cores=0.5, root=one)
    set_cpu_limit("node", cores=0.5, root=two)
    limited = ((one / "cpu/node/cpu.cfs_quota_us").read_text(), (two / "node/cpu.max").read_text())
    set_cpu_limit("node", cores=None, root=one)
    set_cpu_limit("node", cores=None, root=two)
    lifted = ((one / "cpu/node/cpu.cfs_quota_us").read_text(), (two / "node/cpu.max").read_text())

    assert limited == ("50000", "50000 100000")
    assert lifted == ("-1", "max 100000")
