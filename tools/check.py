"""Everything `make check` looks at, side by side; what failed is printed, and how long each check took."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from helm import CHART, find_helm

PYTHON = sys.executable
BIN = Path(PYTHON).parent


@dataclass(frozen=True)
class Check:
    """A program that ends with 0 if all is well."""

    name: str
    command: Sequence[str | Path]


@dataclass(frozen=True)
class Result:
    """How a check ended; `output` holds what it skipped, too."""

    check: Check
    ok: bool
    seconds: float
    output: str


CHECKS = (
    Check("types", (BIN / "mypy",)),  # the slowest first
    Check("manifests", (PYTHON, "tools/check_manifests.py")),
    Check("imports", (BIN / "lint-imports", "--no-cache")),
    Check("generated files", (PYTHON, "tools/generate.py", "--check")),
    Check("format", (BIN / "ruff", "format", "--check", ".")),
    Check("lint", (BIN / "ruff", "check", ".")),
)


def main() -> int:
    """Exit code 1 if any check failed; a check that cannot run here says SKIPPED and why."""
    helm = find_helm()  # may build it, so before the clock starts
    checks = (*CHECKS, Check("helm lint", (helm, "lint", "--strict", "--quiet", CHART))) if helm else CHECKS
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = [show(result) for result in pool.map(run, checks)]
    if helm is None:
        print("SKIPPED helm lint and everything that renders the chart: install helm, or Go to build it")
    failed = [result.check.name for result in results if not result.ok]
    print(f"make check: failed: {', '.join(failed)}" if failed else f"make check: {len(results)} checks passed")
    return 1 if failed else 0


def run(check: Check) -> Result:
    """Run one check and keep what it says."""
    started = time.monotonic()
    command = [str(word) for word in check.command]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return Result(check, ended.returncode == 0, time.monotonic() - started, ended.stdout)


def show(result: Result) -> Result:
    """One line, and the whole output of a check that failed."""
    print(f"{'ok' if result.ok else 'FAILED':<7} {result.check.name:<16} {result.seconds:5.1f} s", flush=True)
    for line in result.output.splitlines():
        if not result.ok or line.startswith("SKIPPED"):
            print(f"        {line}")
    return result


if __name__ == "__main__":
    sys.exit(main())
