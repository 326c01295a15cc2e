"""Entry point of `make bench-trainer`, which compares CPU throughput with TRL and ms-swift and measures startup."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.trainer.cases import CPU_CASES, DeviceSettings, prepare_case, prepare_cases
from benchmarks.trainer.comparison import OURS, PYTHON_PATH, BenchmarkCase, Contender, count_tensors, run_rounds
from benchmarks.trainer.report import describe_case
from testing.peer_environment import NotInstalled, ensure_python


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare our trainer with TRL and ms-swift on CPU.")
    parser.add_argument("--rounds", type=int, default=3, help="trainings per contender and case (default 3)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each contender (default 1)")
    parser.add_argument("--only", default="", help="run only the cases whose title contains this text")
    options = parser.parse_args()
    selected = tuple(case_settings for case_settings in CPU_CASES if options.only in case_settings.title)
    contenders = {contender.name: contender for contender in create_contenders(options.threads)}
    settings = DeviceSettings("float32", "cpu")
    with tempfile.TemporaryDirectory(prefix="bench-trainer-") as scratch:
        for case in prepare_cases(selected, Path(scratch), settings):
            results = run_rounds(case, contenders, rounds=options.rounds, restart_processes=False)
            count_tensors(case, contenders, results)
            print("\n".join(describe_case(case, results)), flush=True)
        for contender in contenders.values():
            contender.close()
        print(measure_start(prepare_case(CPU_CASES[0], Path(scratch) / "start", settings), options.threads))
    return 0


def create_contenders(threads: int) -> tuple[Contender, ...]:
    ours, trl = (Contender(name, Path(sys.executable), threads=threads) for name in (OURS, "TRL"))
    try:
        python = ensure_python(Path(os.environ["FINETUNE_CACHE"]), "ms-swift", lock="ms-swift")
        swift = Contender("ms-swift", python, threads=threads)
    except NotInstalled as error:
        swift = Contender("ms-swift", None, threads=threads, unavailable_reason=str(error))
    return ours, trl, swift


def measure_start(case: BenchmarkCase, threads: int) -> str:
    """Return the duration of each stage of the fastest of three starts; the first start reads uncached files."""
    with tempfile.TemporaryDirectory(prefix="bench-start-") as scratch:
        file = Path(scratch) / "task.json"
        file.write_text(json.dumps(asdict(case.task)))
        stages = min(
            (measure_start_stages(file, threads) for _ in range(3)), key=lambda stage_seconds: stage_seconds["total"]
        )
    return "\n".join(
        ["start of a rank, seconds:", *(f"  {name:<26} {seconds:6.2f}" for name, seconds in stages.items())]
    )


def measure_start_stages(task: Path, threads: int) -> dict[str, float]:
    script = Path(__file__).with_name("contenders") / "startup.py"
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, str(script), str(task), str(time.time())]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    stages: dict[str, float] = json.loads(process.stderr.splitlines()[-1])
    return stages


if __name__ == "__main__":
    sys.exit(main())
