"""Run test suites one by one and print a summary, including the reasons of skipped tests."""

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from testing.cluster.host.commands import HarnessError
from testing.cluster.host.debian_packages import BROWSER, ensure_packages

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "build" / "reports"
SUITES = {  # pytest options by suite; the timeout terminates hanging tests
    "unit": ("--timeout=120", "--numprocesses=auto"),
    "simulation": ("--timeout=1200", "--numprocesses=auto"),  # a few tests simulate thousands of histories each
    # loadscope runs the tests of a file in one worker, because they share launches with two ranks
    "integration": ("--timeout=600", "--numprocesses=2", "--dist=loadscope"),
    "e2e": ("--timeout=900",),
}


@dataclass(frozen=True)
class SuiteResult:
    """Result of one suite: duration, number of tests by outcome, and skipped tests by reason."""

    name: str
    passed: bool
    seconds: float
    count_by_outcome: Counter[str] = field(default_factory=Counter)
    skipped_by_reason: Counter[str] = field(default_factory=Counter)

    @property
    def summary_line(self) -> str:
        """Summary line of the suite, in the style of pytest."""
        kinds = ("passed", "failed", "error", "skipped", "xfailed")
        counts = (
            ", ".join(f"{self.count_by_outcome[kind]} {kind}" for kind in kinds if self.count_by_outcome[kind])
            or "no tests"
        )
        return f"{self.name:<11} {'ok' if self.passed else 'FAILED':<6} {counts} in {self.seconds:.1f} s"


def main() -> int:
    """Run all suites, even after a failure; return exit code 1 if a suite fails or has no tests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suites", nargs="+", choices=SUITES)
    suites: list[str] = parser.parse_args().suites
    if "unit" in suites and os.geteuid() == 0:
        install_browser()
    results = [run_suite(suite) for suite in suites]
    summary = "\n".join(render_summary(results))
    print(f"\n{summary}", flush=True)
    (REPORTS / "summary.txt").write_text(summary + "\n")
    return 0 if all(result.passed for result in results) else 1


def install_browser() -> None:
    """Install a browser for the tests of the HTML report; they are skipped if the installation fails."""
    try:
        ensure_packages(BROWSER)
    except HarnessError as error:
        print(f"no browser for report.html: {error}", flush=True)


def run_suite(suite: str) -> SuiteResult:
    """Run one suite with pytest and parse its JUnit report."""
    REPORTS.mkdir(parents=True, exist_ok=True)
    report = REPORTS / f"{suite}.xml"
    report.unlink(missing_ok=True)
    print(f"== {suite} tests", flush=True)
    started_at = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "--durations=12", "--durations-min=10", *SUITES[suite]]
    command += [f"tests/{suite}", f"--junitxml={report}"]
    completed = subprocess.run(command, cwd=ROOT, check=False)
    seconds = time.monotonic() - started_at
    if not report.exists():
        return SuiteResult(suite, passed=False, seconds=seconds)
    counts, skipped = read_report(report.read_text())
    return SuiteResult(suite, completed.returncode == 0, seconds, counts, skipped)


def read_report(text: str) -> tuple[Counter[str], Counter[str]]:
    """Parse a JUnit report; return the number of tests by outcome and of skipped tests by reason."""
    counts: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    for case in ElementTree.fromstring(text).iter("testcase"):  # noqa: S314 (written by pytest)
        outcome = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        if outcome is None:
            counts["passed"] += 1
        elif outcome.tag == "skipped" and outcome.get("type") == "pytest.xfail":
            counts["xfailed"] += 1
        elif outcome.tag == "skipped":
            counts["skipped"] += 1
            skipped[outcome.get("message", "")] += 1
        else:
            counts["failed" if outcome.tag == "failure" else "error"] += 1
    return counts, skipped


def render_summary(results: list[SuiteResult]) -> Iterator[str]:
    """Yield one line per suite, one per skip reason, and the total."""
    yield from (result.summary_line for result in results)
    for result in results:
        for reason, tests in result.skipped_by_reason.most_common():
            yield f"SKIPPED  {tests} of {result.name}: {reason}"
    total = sum((result.count_by_outcome for result in results), Counter())
    counts = ", ".join(f"{tests} {kind}" for kind, tests in total.items())
    yield f"{'ok' if all(r.passed for r in results) else 'FAILED'}: {counts} in {sum(r.seconds for r in results):.0f} s"


if __name__ == "__main__":
    sys.exit(main())
