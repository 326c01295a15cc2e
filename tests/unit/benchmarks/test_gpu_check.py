"""Tests of the runner of `make gpu-check`: time limits, crashes, exit codes and the list of its cases."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_check import __main__ as gpu_check
from benchmarks.gpu_check.case import GpuCheckCase, GpuCheckOutcome, GpuCheckResult
from benchmarks.gpu_check.catalog import PARTS
from benchmarks.gpu_check.runner import RunSettings, run_cases
from testing.fakes.gpu_check_cases import MODULE

REPOSITORY = Path(__file__).parents[3]


def build_case(function: str, *arguments: str, limit_seconds: int = 60, requires: tuple[str, ...] = ()) -> GpuCheckCase:
    return GpuCheckCase(function, "a property", f"{MODULE}:{function}", limit_seconds, arguments, requires)


@pytest.fixture
def settings(tmp_path: Path) -> RunSettings:
    environment = {**gpu_check.build_environment(None, tmp_path), "PIDS_FILE": str(tmp_path / "pids")}
    machine = {"cuda": False, "modules": {}}
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    return RunSettings(scratch, tmp_path / "results", 1, True, machine, environment, total_seconds=600)


def run(settings: RunSettings, *cases: GpuCheckCase) -> list[GpuCheckResult]:
    return list(run_cases(cases, settings))


def read_results(settings: RunSettings) -> list[dict[str, Any]]:
    return [json.loads(line) for line in settings.results_file.read_text().splitlines()]


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_crashed_case_fails_with_its_exit_code_and_facts(settings: RunSettings) -> None:
    (result,) = run(settings, build_case("crash"))

    assert (result.outcome, result.reason) == (GpuCheckOutcome.FAILED, "its process ended with -6")
    assert result.facts["before_crash"] is True


def test_time_limit_kills_the_case_and_children_in_other_sessions(settings: RunSettings) -> None:
    started_at = time.monotonic()

    result, following = run(settings, build_case("hang", limit_seconds=1), build_case("succeed", "text"))

    assert 6 <= time.monotonic() - started_at < 60
    assert (result.outcome, result.reason) == (GpuCheckOutcome.FAILED, "exceeded its time limit of 6 s")
    assert len(result.facts["pids"]) == 2
    assert not any(map(is_running, result.facts["pids"]))
    assert following.outcome is GpuCheckOutcome.PASSED


def test_killed_run_leaves_finished_cases_and_no_processes(settings: RunSettings, tmp_path: Path) -> None:
    """SIGTERM ends the run during the second case."""
    process = subprocess.Popen(
        [sys.executable, "-m", MODULE, str(settings.scratch), str(settings.results)],
        env=dict(settings.environment),
        stdout=subprocess.PIPE,
        text=True,
    )
    pids_file = tmp_path / "pids"
    while process.poll() is None and not (pids_file.exists() and len(pids_file.read_text().split()) == 2):
        time.sleep(0.1)

    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)

    assert process.returncode == 143, output
    assert [line["case"] for line in read_results(settings)[1:]] == ["succeed"]
    assert "1 passed, 0 failed, 0 skipped" in output
    assert not any(is_running(int(pid)) for pid in pids_file.read_text().split())


@pytest.mark.parametrize(("function", "code"), [("succeed", 0), ("fail", 1)])
def test_exit_code_is_1_if_a_case_failed(
    settings: RunSettings, function: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("text",) if function == "succeed" else ()
    monkeypatch.setitem(PARTS, 2, (build_case(function, *arguments), build_case("skip")))

    assert gpu_check.run_part(replace(settings, part=2), only="") == code


def test_names_of_all_cases_are_unique_and_their_functions_exist() -> None:
    cases = [case for part in PARTS.values() for case in part]

    assert len(cases) == len({case.name for case in cases}) == 31
    for case in cases:
        module, _, function = case.function.partition(":")
        source = REPOSITORY / f"{module.replace('.', '/')}.py"
        assert f"def {function}(context: CheckContext" in source.read_text(), case.name


def test_every_case_is_documented_with_what_it_proves() -> None:
    page = (REPOSITORY / "docs/contributing/benchmarks.md").read_text()

    for case in (case for part in PARTS.values() for case in part):
        assert f"| {case.name} | {case.proves} |" in page, case.name


def test_entry_point_needs_only_the_standard_library() -> None:
    """It installs the packages, so that it must start without them."""
    command = [sys.executable, "-I", "-S", "-c"]
    program = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); import benchmarks.gpu_check.__main__"

    completed = subprocess.run([*command, program], capture_output=True, text=True, check=False)

    assert completed.returncode == 0, completed.stderr
