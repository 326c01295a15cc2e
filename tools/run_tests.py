"""Run test suites and print a summary, including the reasons of skipped tests.

The suites run one by one, except that the simulation runs beside the suites on a cluster, which mostly wait. Several
workers share the cluster; the tests marked `alone` run after the others, one by one.
"""

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest

from prometheus import prepare_programs
from testing.cluster.host.commands import HarnessError
from testing.cluster.host.debian_packages import BROWSER, ensure_packages
from testing.cluster.images.go_build import build_all
from testing.cluster.images.project_images import TARGETS, ImageBuilder
from testing.cluster.provider import ClusterProvider, ThrowawayProvider, choose_provider
from testing.cluster.throwaway import REQUIRED_COMPONENTS

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "build" / "reports"
SUITES = {  # pytest options by suite; the timeout terminates hanging tests
    "unit": ("--timeout=120", "--numprocesses=auto"),
    "simulation": ("--timeout=3600", "--numprocesses=auto"),  # a few tests simulate thousands of histories each
    # loadscope runs the tests of a file in one worker, because they share launches with two ranks
    "integration": ("--timeout=1200", "--numprocesses=2", "--dist=loadscope"),
    "e2e": ("--timeout=900",),
    "queue": ("--timeout=900",),
}
CLUSTER_WORKERS = ("--numprocesses=4", "--maxschedchunk=1")  # a worker that is free takes the next test
MARKERS = {False: "not long and not ip_family", True: "long"}  # tools/run_matrix.py runs the tests marked ip_family
BACKGROUND_SUITE = "simulation"
CLUSTER_SUITES = ("e2e", "queue")
# Prefix of a command that runs in the background. The kernel first divides the CPU time among sessions, and applies
# `nice` only within a session; the processes of a throwaway cluster are in other sessions than the tests. Therefore the
# command gets its own session (see run_pytest), of a tenth of their weight until they have ended. It ends with this
# program, and the next argument is the beginning of the name of a file for its process id.
LOW_PRIORITY = (
    *("setpriv", "--pdeathsig", "TERM"),
    *("sh", "-c", 'echo 10 2>/dev/null >/proc/self/autogroup; echo $$ >"$0.pid"; exec nice -n 19 "$@"'),
)


@dataclass(frozen=True)
class CaseResult:
    """Outcome of one test case; `module` is its file without the suffix, `message` the reason if it was skipped."""

    module: str
    outcome: str
    message: str = ""


@dataclass(frozen=True)
class SuiteResult:
    """Result of one suite: duration, and the outcome of each test case."""

    name: str
    passed: bool
    seconds: float
    cases: tuple[CaseResult, ...] = ()

    @property
    def count_by_outcome(self) -> Counter[str]:
        """Number of test cases by outcome."""
        return Counter(case.outcome for case in self.cases)

    @property
    def skipped_by_reason(self) -> Counter[str]:
        """Number of skipped test cases by reason."""
        return Counter(case.message for case in self.cases if case.outcome == "skipped")

    @property
    def summary_line(self) -> str:
        """Summary line of the suite, in the style of pytest."""
        counts = format_counts(self.count_by_outcome) or "no tests"
        return f"{self.name:<11} {'ok' if self.passed else 'FAILED':<6} {counts} in {self.seconds:.1f} s"


def format_counts(count_by_outcome: Counter[str]) -> str:
    """Format the number of tests by outcome, without the outcomes that did not occur."""
    kinds = ("passed", "failed", "error", "skipped", "xfailed")
    return ", ".join(f"{count_by_outcome[kind]} {kind}" for kind in kinds if count_by_outcome[kind])


def main() -> int:
    """Run all suites, even after a failure; return exit code 1 if a suite fails or has no tests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suites", nargs="+", choices=SUITES)
    parser.add_argument("--long", action="store_true", help="run the tests marked long instead of all others")
    arguments = parser.parse_args()
    suites: list[str] = arguments.suites
    if "unit" in suites:
        prepare_programs()
    if "unit" in suites and os.geteuid() == 0:
        install_browser()
    started_at = time.monotonic()
    results = run_suites(suites, partial(run_suite, markers=MARKERS[arguments.long]))
    summary = "\n".join(render_summary(results, seconds=time.monotonic() - started_at))
    print(f"\n{summary}", flush=True)
    (REPORTS / "summary.txt").write_text(summary + "\n")
    return 0 if all(result.passed for result in results) else 1


def install_browser() -> None:
    """Install a browser for the tests of the HTML report; they are skipped if the installation fails."""
    try:
        ensure_packages(BROWSER)
    except HarnessError as error:
        print(f"no browser for report.html: {error}", flush=True)


def run_suite(suite: str, *, markers: str, log: Path | None = None) -> SuiteResult:
    """Run the tests of a suite that have these markers; with `log`, at a low priority and with the output there."""
    if suite not in CLUSTER_SUITES:
        return run_pytest(suite, *SUITES[suite], "-m", markers, f"tests/{suite}", log=log)
    return run_cluster_suite(suite, markers=markers)


def run_cluster_suite(suite: str, *, markers: str) -> SuiteResult:
    """Run a suite on one cluster: first with several workers, then its tests marked `alone`; remove the cluster.

    If the cluster cannot be built, the result has no tests.
    """
    try:
        provider = choose_provider(os.environ).provider
        build_cluster(provider)
    except HarnessError as error:
        print(f"{suite}: {error}", flush=True)
        return SuiteResult(suite, passed=False, seconds=0.0)
    shared, alone = (
        run_pytest(
            *(name, *SUITES[suite], *workers, "-m", f"{markers} and {marker}", f"tests/{suite}"),
            environment={"KEEP_CLUSTER": "1"},
            may_be_empty=marker == "alone",
        )
        for name, workers, marker in ((suite, CLUSTER_WORKERS, "not alone"), (f"{suite}-alone", (), "alone"))
    )
    if provider is not None and os.environ.get("KEEP_CLUSTER") != "1":
        provider.down()
    seconds = shared.seconds + alone.seconds
    return SuiteResult(suite, passed=shared.passed and alone.passed, seconds=seconds, cases=shared.cases + alone.cases)


def build_cluster(provider: ClusterProvider | None) -> None:
    """Build the programs and images of the cluster; on a new machine, this takes longer than a test may take."""
    if isinstance(provider, ThrowawayProvider):
        build_all(provider.cache, provider.versions, component_names=(*REQUIRED_COMPONENTS, "helm"))
    if provider is not None:
        for target in TARGETS:
            ImageBuilder(provider.cache).build(target)


def run_suites(suites: Sequence[str], run: Callable[..., SuiteResult]) -> list[SuiteResult]:
    """Run the suites and return their results in this order; the simulation runs beside the suites on a cluster."""
    cluster_suites = [suite for suite in suites if suite in CLUSTER_SUITES]
    if BACKGROUND_SUITE not in suites or not cluster_suites:
        return [run(suite) for suite in suites]
    log = REPORTS / f"{BACKGROUND_SUITE}.log"
    results = {suite: run(suite) for suite in suites if suite not in (BACKGROUND_SUITE, *cluster_suites)}
    with ThreadPoolExecutor(max_workers=1) as executor:
        in_background = executor.submit(run, BACKGROUND_SUITE, log=log)
        results |= {suite: run(suite) for suite in cluster_suites}
        with suppress(OSError):  # otherwise, other programs of the machine would delay the end for long
            Path("/proc", Path(f"{log}.pid").read_text().strip(), "autogroup").write_text("0")
        results[BACKGROUND_SUITE] = in_background.result()
    print(f"== {BACKGROUND_SUITE} tests, which ran beside the suites on a cluster\n{log.read_text()}", flush=True)
    return [results[suite] for suite in suites]


def run_pytest(
    name: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
    may_be_empty: bool = False,
) -> SuiteResult:
    """Run pytest with additional environment variables, and parse its JUnit report.

    log: file for the output of pytest, which then runs at a low priority. may_be_empty: no tests are no failure.
    """
    REPORTS.mkdir(parents=True, exist_ok=True)
    report = REPORTS / f"{name}.xml"
    report.unlink(missing_ok=True)
    print(f"== {name} tests", flush=True)
    started_at = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "--durations=12", "--durations-min=10", *arguments]
    command.append(f"--junitxml={report}")
    if log is not None:
        command = [*LOW_PRIORITY, str(log.absolute()), *command]
    with log.open("w") if log else nullcontext() as output:
        completed = subprocess.run(
            command,
            cwd=ROOT,
            check=False,
            env={**os.environ, **(environment or {})},
            stdout=output,
            start_new_session=log is not None,
        )
    seconds = time.monotonic() - started_at
    cases = tuple(read_report(report.read_text())) if report.exists() else ()
    passed = completed.returncode in ((0, pytest.ExitCode.NO_TESTS_COLLECTED) if may_be_empty else (0,))
    return SuiteResult(name, passed=passed, seconds=seconds, cases=cases)


def read_report(text: str) -> Iterator[CaseResult]:
    """Parse a JUnit report, and yield the outcome of each test case."""
    for case in ElementTree.fromstring(text).iter("testcase"):  # noqa: S314 (written by pytest)
        module = case.get("classname", "").rpartition(".")[2]
        cause = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        if cause is None:
            yield CaseResult(module, "passed")
        elif cause.tag == "skipped" and cause.get("type") == "pytest.xfail":
            yield CaseResult(module, "xfailed")
        elif cause.tag == "skipped":
            yield CaseResult(module, "skipped", cause.get("message", ""))
        else:
            yield CaseResult(module, "failed" if cause.tag == "failure" else "error")


def render_summary(results: Sequence[SuiteResult], *, seconds: float | None = None) -> Iterator[str]:
    """Yield one line per suite, one per skip reason, and the total.

    seconds: time of all suites, if some of them ran at the same time.
    """
    yield from (result.summary_line for result in results)
    for result in results:
        for reason, tests in result.skipped_by_reason.most_common():
            yield f"SKIPPED  {tests} of {result.name}: {reason}"
    total = sum((result.count_by_outcome for result in results), Counter())
    counts = ", ".join(f"{tests} {kind}" for kind, tests in total.items())
    seconds = sum(result.seconds for result in results) if seconds is None else seconds
    yield f"{'ok' if all(result.passed for result in results) else 'FAILED'}: {counts} in {seconds:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
