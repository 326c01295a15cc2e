"""Entry point of `make bench-gpu`, which compares realistic model shapes with TRL and runs a job with an OOM repair.

The comparison uses one GPU. The weights are random. `--small` uses small models on CPU, where testing/fakes/inject
raises the out-of-memory error.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.trainer.cases import (
    GPU_CASES,
    OUT_OF_MEMORY_CASE,
    CaseSettings,
    DeviceSettings,
    prepare_cases,
    shrink_case,
    write_task,
)
from benchmarks.trainer.comparison import OURS, BenchmarkCase, Contender, ResultsByContender, run_rounds
from benchmarks.trainer.machine import describe_machine, summarise_machine
from benchmarks.trainer.out_of_memory import describe_attempts, run_out_of_memory_job
from benchmarks.trainer.report import describe_case
from benchmarks.trainer.scratch import choose_scratch_folder
from finetune_trainer.metrics.flops import peak_flops


def main(arguments: Sequence[str]) -> int:
    options = parse_options(arguments)
    if not options.small and not torch.cuda.is_available():
        print("no CUDA device: nothing was measured")
        return 0
    settings = (
        DeviceSettings("float32", "cpu", forecasts_memory=True)
        if options.small
        else DeviceSettings("bfloat16", "cuda", forecasts_memory=True)
    )
    machine = describe_machine()
    print(summarise_machine(machine))
    write_result(options.results, {"machine": machine})
    deadline = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="bench-gpu-", dir=choose_scratch_folder()) as scratch:
        folder = Path(scratch)
        for case in prepare_cases(select_cases(options, deadline), folder / "cases", settings):
            results = compare_contenders(case, rounds=options.rounds)
            write_result(options.results, summarise_results(case, results))
        if options.only in OUT_OF_MEMORY_CASE.title:
            case_settings = shrink_case(OUT_OF_MEMORY_CASE) if options.small else OUT_OF_MEMORY_CASE
            run = run_out_of_memory_job(write_task(case_settings, folder / "oom", settings), folder / "job")
            lines = [f"{case_settings.title}: exit code {run.exit_code}", *describe_attempts(run.job)]
            print("\n".join([*lines, run.output.splitlines()[-1]]))
            write_result(options.results, {"case": case_settings.title, "lines": lines})
    return 0


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare our trainer with TRL on one GPU, at realistic model shapes.")
    parser.add_argument("--rounds", type=int, default=1, help="trainings per contender and case (default 1)")
    parser.add_argument("--only", default="", help="run only the cases whose title contains this text")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no further comparison after this time")
    parser.add_argument("--results", type=Path, help="append one JSON line per case to this file")
    parser.add_argument("--small", action="store_true", help="small models on CPU, to test the benchmark itself")
    return parser.parse_args(arguments)


def select_cases(options: argparse.Namespace, deadline: float) -> Iterator[CaseSettings]:
    """Yield the settings of the selected cases; report those that do not begin before the deadline."""
    for case_settings in GPU_CASES:
        if options.only not in case_settings.title:
            continue
        if time.monotonic() > deadline:
            print(f"{case_settings.title}: skipped, --minutes {options.minutes:g} have passed", flush=True)
            continue
        yield shrink_case(case_settings) if options.small else case_settings


def compare_contenders(case: BenchmarkCase, *, rounds: int) -> ResultsByContender:
    """Run all contenders and print the results; on a GPU, only one process runs at a time."""
    on_gpu = case.task.on_gpu
    threads = torch.get_num_threads()
    contenders = {name: Contender(name, Path(sys.executable), threads=threads) for name in (OURS, "TRL")}
    results = run_rounds(case, contenders, rounds=rounds, restart_processes=on_gpu)
    for contender in contenders.values():
        contender.close()
    peak = peak_flops(torch.cuda.get_device_name(), getattr(torch, case.task.dtype)) if on_gpu else None
    print("\n".join(describe_case(case, results, peak_flops=peak)), flush=True)
    return results


def summarise_results(case: BenchmarkCase, results: ResultsByContender) -> dict[str, Any]:
    """Return the content and measurements of a case as JSON values."""
    return {
        "case": case.title,
        "content": asdict(case.content),
        "results": {name: asdict(result) for name, result in results.items()},
    }


def write_result(file: Path | None, result: dict[str, Any]) -> None:
    """Append one JSON line and write it to the disk, so that a killed benchmark leaves the finished cases."""
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(result) + "\n")
        lines.flush()
        os.fsync(lines.fileno())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
