"""Run the checks of `make check` in parallel and print their durations and the output of failed checks."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from go_programs import find_program
from helm import CHART, find_helm
from testing.cluster.host.versions import ACTIONLINT

PYTHON = sys.executable
BIN = Path(PYTHON).parent


@dataclass(frozen=True)
class Check:
    """A command that returns exit code 0 if the check passes."""

    name: str
    command: Sequence[str | Path]


@dataclass(frozen=True)
class CheckResult:
    """Result of a check; `output` includes SKIPPED lines."""

    check: Check
    passed: bool
    seconds: float
    output: str


CHECKS = (
    Check("types", (BIN / "mypy",)),  # the slowest check starts first
    Check("manifests", (PYTHON, "tools/check_manifests.py")),
    Check("imports", (BIN / "lint-imports", "--no-cache")),
    Check("generated files", (PYTHON, "tools/generate.py", "--check")),
    Check("format", (BIN / "ruff", "format", "--check", ".")),
    Check("lint", (BIN / "ruff", "check", ".")),
    Check("vocabulary", (PYTHON, "tools/check_vocabulary.py")),
    Check("docs", (PYTHON, "tools/check_docs.py")),
    Check("budgets", (PYTHON, "tools/check_budgets.py")),
)


def main() -> int:
    """Run all checks and return exit code 1 if a check failed; report checks that cannot run as SKIPPED."""
    # find these programs first: building them must not count as the duration of a check
    helm, actionlint = find_helm(), find_program("actionlint", ACTIONLINT)
    checks: tuple[Check, ...] = CHECKS
    checks += (Check("helm lint", (helm, "lint", "--strict", "--quiet", CHART)),) if helm else ()
    checks += (Check("workflows", (actionlint, "-no-color")),) if actionlint else ()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = [print_result(result) for result in pool.map(run_check, checks)]
    if helm is None:
        print("SKIPPED helm lint and all checks of the rendered chart: install helm, or Go to build it")
    if actionlint is None:
        print("SKIPPED the check of the workflows: install actionlint, or Go to build it")
    failed = [result.check.name for result in results if not result.passed]
    print(f"make check: failed: {', '.join(failed)}" if failed else f"make check: {len(results)} checks passed")
    return 1 if failed else 0


def run_check(check: Check) -> CheckResult:
    """Run one check and capture its output."""
    started_at = time.monotonic()
    command = [str(word) for word in check.command]
    completed = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return CheckResult(check, completed.returncode == 0, time.monotonic() - started_at, completed.stdout)


def print_result(result: CheckResult) -> CheckResult:
    """Print one line for a check, and the whole output if it failed; return the result."""
    print(f"{'ok' if result.passed else 'FAILED':<7} {result.check.name:<16} {result.seconds:5.1f} s", flush=True)
    for line in result.output.splitlines():
        if not result.passed or line.startswith("SKIPPED"):
            print(f"        {line}")
    return result


if __name__ == "__main__":
    sys.exit(main())
