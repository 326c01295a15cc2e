"""Entry point of `make bench-gpu`, which compares realistic model shapes with TRL and runs a job with an OOM repair.

The comparison uses one GPU. The weights are random. `--small` uses small models on CPU, where testing/fakes/inject
raises the out-of-memory error.
"""

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.trainer.cases import (
    GPU_CASES,
    OUT_OF_MEMORY_CASE,
    DeviceSettings,
    prepare_case,
    prepare_cases,
    shrink_case,
)
from benchmarks.trainer.comparison import OURS, PYTHON_PATH, REPOSITORY, BenchmarkCase, Contender, run_rounds
from benchmarks.trainer.ours import build_spec
from benchmarks.trainer.report import describe_case
from finetune_trainer.metrics.flops import peak_flops
from testing.processes.local_mode import LocalJob, build_job_body, write_job_file

INJECTED_ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join((str(REPOSITORY / "testing/fakes/inject"), PYTHON_PATH)),
    "OOM_ABOVE_SAMPLES": "1",
    "PASSES_BEFORE_FAULT": "2",
}
TIMEOUT_SECONDS = 1800


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Compare our trainer with TRL on one GPU, at realistic model shapes.")
    parser.add_argument("--rounds", type=int, default=3, help="trainings per contender and case (default 3)")
    parser.add_argument("--only", default="", help="run only the cases whose title contains this text")
    parser.add_argument("--small", action="store_true", help="small models on CPU, to test the benchmark itself")
    options = parser.parse_args(arguments)
    if not options.small and not torch.cuda.is_available():
        print("no CUDA device: nothing was measured")
        return 0
    settings = (
        DeviceSettings("float32", "cpu", forecasts_memory=True)
        if options.small
        else DeviceSettings("bfloat16", "cuda", forecasts_memory=True)
    )
    print(describe_device(settings))
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as scratch:
        folder = Path(scratch)
        selected = [
            shrink_case(case_settings) if options.small else case_settings
            for case_settings in GPU_CASES
            if options.only in case_settings.title
        ]
        for case in prepare_cases(selected, folder / "cases", settings):
            compare_contenders(case, rounds=options.rounds)
        if options.only in OUT_OF_MEMORY_CASE.title:
            case_settings = shrink_case(OUT_OF_MEMORY_CASE) if options.small else OUT_OF_MEMORY_CASE
            case = prepare_case(case_settings, folder / "out-of-memory", settings)
            print("\n".join(run_out_of_memory_job(case, folder / "job", INJECTED_ENVIRONMENT if options.small else {})))
    return 0


def describe_device(settings: DeviceSettings) -> str:
    if settings.device == "cpu":
        return f"CPU, torch {torch.__version__}"
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"


def compare_contenders(case: BenchmarkCase, *, rounds: int) -> None:
    """Run all contenders and print the results; on a GPU, only one process runs at a time."""
    on_gpu = case.task.on_gpu
    threads = torch.get_num_threads()
    contenders = {name: Contender(name, Path(sys.executable), threads=threads) for name in (OURS, "TRL")}
    results = run_rounds(case, contenders, rounds=rounds, restart_processes=on_gpu)
    for contender in contenders.values():
        contender.close()
    peak = peak_flops(torch.cuda.get_device_name(), getattr(torch, case.task.dtype)) if on_gpu else None
    print("\n".join(describe_case(case, results, peak_flops=peak)), flush=True)


def run_out_of_memory_job(case: BenchmarkCase, folder: Path, environment: dict[str, str]) -> list[str]:
    """Run `finetune run` with micro-batches too large for the GPU; return the attempts and the last output line."""
    spec: dict[str, Any] = build_spec(case.task)
    spec["training"] |= {"maxSteps": 3}
    del spec["training"]["numTrainEpochs"]
    spec["env"] = [{"name": name, "value": value} for name, value in environment.items()]
    job = write_job_file(folder, build_job_body(spec), {})
    process = job.start()
    try:
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
    return [f"{case.title}: exit code {process.returncode}", *describe_attempts(job), output.splitlines()[-1]]


def describe_attempts(job: LocalJob) -> list[str]:
    attempts = [
        f"  attempt {record.attempt}: {record.reason or record.state}: {record.message}"
        for record in job.status.attempts
    ]
    return [*attempts, f"  batch: {job.status.batch}"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
