"""Entry point of `make gpu-check`, which proves the trainer on one machine with one GPU and without network.

It uses only the standard library, because it installs the packages of the trainer first: `--wheels` is a folder that
`make gpu-check-wheels` has written on a machine with a package index. Without `--wheels`, the installed packages are
used. `--small` uses tiny models, and CPU and gloo if there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.gpu_check.case import GpuCheckOutcome, GpuCheckResult
from benchmarks.gpu_check.catalog import PARTS
from benchmarks.gpu_check.marked_processes import MARKER, kill_marked_processes
from benchmarks.gpu_check.report import render_line, render_table
from benchmarks.gpu_check.runner import RunSettings, run_cases
from benchmarks.gpu_check.wheel_folder import WheelFolderRejected, install_wheels
from benchmarks.trainer.scratch import choose_scratch_folder

REPOSITORY = Path(__file__).parents[2]
RESULTS = REPOSITORY / "build/gpu-check"
TOTAL_MINUTES, SMALL_TOTAL_MINUTES = 8.7, 60.0


def main(arguments: Sequence[str]) -> int:
    """Run the cases of a part and print a table. Return 1 if a case failed, and 2 if none could be started."""
    options = parse_options(arguments)
    if options.list:
        print("\n".join(f"{part}  {case.name}: {case.proves}" for part, cases in PARTS.items() for case in cases))
        return 0
    signal.signal(signal.SIGTERM, exit_on_signal)
    mark = os.environ[MARKER] = f"gpu-check-{os.getpid()}"  # inherited by pip and compileall; cases have their own
    try:
        return prepare_and_run(options)
    finally:
        kill_marked_processes(mark)


def prepare_and_run(options: argparse.Namespace) -> int:
    """Install the wheels, describe the machine and run the cases; return the exit code."""
    started_at = time.monotonic()
    minutes = options.minutes or (SMALL_TOTAL_MINUTES if options.small else TOTAL_MINUTES)
    with tempfile.TemporaryDirectory(prefix="gpu-check-", dir=choose_scratch_folder()) as scratch:
        try:
            environment = build_environment(options.wheels, Path(scratch) / "site")
            machine = describe_machine(environment)
        except (WheelFolderRejected, subprocess.CalledProcessError) as error:
            print(f"gpu-check: {error}", file=sys.stderr)
            return 2
        print(json.dumps(machine, indent=1), f"prepared in {time.monotonic() - started_at:.1f} s", sep="\n", flush=True)
        if not machine["cuda"] and not options.small:
            print("gpu-check: no CUDA device; --small runs the cases that a CPU can run", file=sys.stderr)
            return 2
        remaining = 60 * minutes - (time.monotonic() - started_at)
        settings = RunSettings(
            Path(scratch), options.results, options.part, options.small, machine, environment, remaining
        )
        return run_part(settings, only=options.only)


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu-check", description="Prove the trainer on one machine with one GPU.")
    parser.add_argument(
        "--part", type=int, choices=sorted(PARTS), default=1, help="1: launch, kernels, presets; 2: rest"
    )
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install (default: use installed packages)")
    parser.add_argument("--only", default="", help="run only the cases whose name contains this text")
    parser.add_argument("--minutes", type=float, help=f"total time (default {TOTAL_MINUTES}, with --small more)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of JSON lines and logs")
    parser.add_argument("--small", action="store_true", help="tiny models; a CPU suffices for most cases")
    parser.add_argument("--list", action="store_true", help="print the cases and exit")
    return parser.parse_args(arguments)


def run_part(settings: RunSettings, *, only: str) -> int:
    """Run the selected cases; print the table even if the run is interrupted."""
    cases = [case for case in PARTS[settings.part] if only in case.name]
    settings.results.mkdir(parents=True, exist_ok=True)
    settings.results_file.unlink(missing_ok=True)
    started_at, results = time.monotonic(), list[GpuCheckResult]()
    try:
        for result in run_cases(cases, settings):
            results.append(result)
            print(render_line(result), flush=True)
    finally:
        print(f"\n{render_table(results)}\n{time.monotonic() - started_at:.0f} s; {settings.results_file}", flush=True)
    return 1 if any(result.outcome is GpuCheckOutcome.FAILED for result in results) else 0


def build_environment(wheels: Path | None, site: Path) -> dict[str, str]:
    """Install the wheels, and return the environment of the cases. Raises: WheelFolderRejected, CalledProcessError."""
    if wheels:
        install_wheels(wheels, site)
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if Path(path).is_absolute()]
    paths = [
        *([str(site)] if wheels else []),
        *(str(REPOSITORY / part) for part in ("operator", "trainer", "tools", "")),
    ]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*paths, *inherited]),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }


def describe_machine(environment: dict[str, str]) -> dict[str, Any]:
    """Return GPU, driver and versions, which a separate process reads with the environment of the cases."""
    program = [sys.executable, "-m", "benchmarks.trainer.machine"]
    process = subprocess.run(program, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    machine: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return machine


def exit_on_signal(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(143)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
