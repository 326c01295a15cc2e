"""Tests of the programs that the Makefile runs."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from xml.etree import ElementTree

import pytest

import run_tests
from check_docs import find_missing_tests, list_tests
from environment import build_uv_environment, delete_unused_environments
from run_matrix import CLUSTERS
from run_tests import SuiteResult, read_report, render_summary
from testing.cluster.host.versions import OTHER_KUBERNETES, PINNED

REPORT = """<testsuites><testsuite>
<testcase classname="tests.e2e.test_x" name="a"/><testcase classname="tests.e2e.test_y" name="b"/>
<testcase classname="tests.e2e.test_x" name="c"><failure message="no"/></testcase>
<testcase name="d"><skipped type="pytest.skip" message="no cluster: not root"/></testcase>
<testcase name="e"><error message="fixture"/></testcase>
</testsuite></testsuites>"""

PRIORITY_TEST = """import os, pathlib
def test_priority():
    assert os.nice(0) == 19
    autogroup = pathlib.Path("/proc/self/autogroup")
    assert not autogroup.exists() or autogroup.read_text().endswith("nice 10\\n")
"""
MARKED_TESTS = """import pytest
def test_short(): pass
@pytest.mark.long("reason")
def test_long(): pass
@pytest.mark.ip_family
def test_ip_family(): pass
"""
ENDLESS_TEST = """import signal, sys
def test_endless():
    print("started", file=sys.stderr, flush=True)
    signal.pause()
"""


def test_uv_uses_the_index_and_links_configured_for_pip() -> None:
    environment = build_uv_environment(
        {"PIP_INDEX_URL": "https://mirror.example/simple", "UV_FIND_LINKS": "/wheels", "HOME": "/h"}
    )

    assert environment == {
        "PIP_INDEX_URL": "https://mirror.example/simple",
        "UV_INDEX_URL": "https://mirror.example/simple",
        "UV_FIND_LINKS": "/wheels",
        "HOME": "/h",
    }


def test_unused_and_incomplete_environments_are_removed(tmp_path: Path) -> None:
    for name in ("used", "unused", "incomplete"):
        (tmp_path / name).mkdir()
    (tmp_path / "lock").touch()
    for name in ("used", "unused"):
        (tmp_path / name / "complete").touch()
    used_at = (tmp_path / "used" / "complete").stat().st_mtime
    os.utime(tmp_path / "unused" / "complete", (used_at - 100, used_at - 100))

    delete_unused_environments(tmp_path, unused_since=used_at - 50)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "used"]


def test_simulation_runs_beside_the_suites_on_a_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run_tests, "REPORTS", tmp_path)
    started: list[str] = []
    simulation_may_end = threading.Event()

    def run(suite: str, *, log: Path | None = None) -> SuiteResult:
        started.append(suite)
        if log is not None:
            assert simulation_may_end.wait(timeout=10), "the suites on a cluster wait for the simulation"
            log.write_text("1 passed")
        if suite == "queue":
            simulation_may_end.set()
        return SuiteResult(suite, passed=True, seconds=1.0)

    results = run_tests.run_suites(["unit", "simulation", "integration", "e2e", "queue"], run)

    assert started[:2] == ["unit", "integration"]
    assert [result.name for result in results] == ["unit", "simulation", "integration", "e2e", "queue"]


def test_simulation_without_a_cluster_runs_at_normal_priority() -> None:
    def run(suite: str) -> SuiteResult:
        return SuiteResult(suite, passed=True, seconds=1.0)

    assert [result.name for result in run_tests.run_suites(["unit", "simulation"], run)] == ["unit", "simulation"]


@pytest.mark.parametrize(("long", "names"), [(False, ["test_short"]), (True, ["test_long"])])
def test_long_tests_run_with_the_option_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, long: bool, names: list[str]
) -> None:
    monkeypatch.setattr(run_tests, "ROOT", tmp_path)
    monkeypatch.setattr(run_tests, "REPORTS", tmp_path)
    (tmp_path / "tests/integration").mkdir(parents=True)
    (tmp_path / "tests/integration/test_marked.py").write_text(MARKED_TESTS)

    result = run_tests.run_suite("integration", markers=run_tests.MARKERS[long])

    assert result.passed
    report = ElementTree.parse(tmp_path / "integration.xml")  # noqa: S314 (written by pytest)
    assert [case.get("name") for case in report.iter("testcase")] == names


def test_output_in_a_log_is_that_of_pytest_at_a_low_priority(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run_tests, "REPORTS", tmp_path)
    test_file = tmp_path / "test_priority.py"
    test_file.write_text(PRIORITY_TEST)

    result = run_tests.run_pytest("background", "-p", "no:cacheprovider", str(test_file), log=tmp_path / "log")

    assert result.passed
    assert "1 passed" in (tmp_path / "log").read_text()


def test_pytest_at_a_low_priority_ends_with_the_program_that_started_it(tmp_path: Path) -> None:
    test_file = tmp_path / "test_endless.py"
    test_file.write_text(ENDLESS_TEST)
    program = (
        "import run_tests; from pathlib import Path; run_tests.REPORTS = Path('.');"
        f"run_tests.run_pytest('endless', '-s', '-p', 'no:cacheprovider', {str(test_file)!r}, log=Path('log'))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stderr is not None
        while process.stderr.readline() != b"started\n":
            assert process.poll() is None
        process.kill()
        process.stderr.read()  # until all processes that inherited it have ended


def test_summary_contains_counts_and_all_skip_reasons() -> None:
    cases = tuple(read_report(REPORT))
    lines = list(render_summary([SuiteResult("e2e", passed=False, seconds=2.0, cases=cases)]))

    assert lines == [
        "e2e         FAILED 2 passed, 1 failed, 1 error, 1 skipped in 2.0 s",
        "SKIPPED  1 of e2e: no cluster: not root",
        "FAILED: 2 passed, 1 failed, 1 skipped, 1 error in 2 s",
    ]


def test_matrix_runs_every_other_version_and_both_ip_families_with_ipv6() -> None:
    assert [cluster.title for cluster in CLUSTERS] == [
        *OTHER_KUBERNETES,
        f"{PINNED.kubernetes}-ipv6",
        f"{PINNED.kubernetes}-dual",
    ]
    assert PINNED.kubernetes not in OTHER_KUBERNETES


def test_page_that_names_a_missing_test_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("check_docs.ROOT", tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text("async def test_b() -> None: ...\n    def test_nested(): ...\n")
    page = tmp_path / "page.md"
    page.write_text("see `test_a`, `test_b`, `test_nested` and `test_c`")
    list_tests.cache_clear()

    problems = list(find_missing_tests(page))

    list_tests.cache_clear()
    assert [problem.split(": ")[1] for problem in problems] == ["test_nested", "test_c"]
