"""`make bench-trainer`: tokens per second on CPU beside TRL and ms-swift, in turn, and what a start is made of."""

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

from benchmarks.trainer.cases import ON_CPU, Machine, prepare, prepare_all
from benchmarks.trainer.comparison import OURS, PATHS, Case, Contender, hold
from benchmarks.trainer.report import describe_case
from benchmarks.trainer.swift_environment import NotInstalled, obtain_python


def main() -> int:
    parser = argparse.ArgumentParser(description="Our trainer beside TRL and ms-swift, on CPU.")
    parser.add_argument("--rounds", type=int, default=3, help="how often each trains each case (default 3)")
    parser.add_argument("--threads", type=int, default=1, help="of each contender (default 1)")
    parser.add_argument("--only", default="", help="cases whose title has this in it")
    options = parser.parse_args()
    runs = tuple(run for run in ON_CPU if options.only in run.title)
    contenders = {each.name: each for each in assemble(options.threads)}
    machine = Machine("float32", "cpu")
    with tempfile.TemporaryDirectory(prefix="bench-trainer-") as scratch:
        for case in prepare_all(runs, Path(scratch), machine):
            outcomes = hold(case, contenders, rounds=options.rounds, fresh=False)
            print("\n".join(describe_case(case, outcomes)), flush=True)
        for contender in contenders.values():
            contender.close()
        print(measure_start(prepare(ON_CPU[0], Path(scratch) / "start", machine), options.threads))
    return 0


def assemble(threads: int) -> tuple[Contender, ...]:
    ours, trl = (Contender(name, Path(sys.executable), threads=threads) for name in (OURS, "TRL"))
    try:
        swift = Contender("ms-swift", obtain_python(Path(os.environ["FINETUNE_CACHE"])), threads=threads)
    except NotInstalled as problem:
        swift = Contender("ms-swift", None, threads=threads, why_not=str(problem))
    return ours, trl, swift


def measure_start(case: Case, threads: int) -> str:
    """The best of three: the first reads files that the others find in memory."""
    with tempfile.TemporaryDirectory(prefix="bench-start-") as scratch:
        file = Path(scratch) / "task.json"
        file.write_text(json.dumps(asdict(case.task)))
        stages = min((start(file, threads) for _ in range(3)), key=lambda found: found["together"])
    return "\n".join(["start of a rank, seconds:", *(f"  {name:<26} {took:6.2f}" for name, took in stages.items())])


def start(task: Path, threads: int) -> dict[str, float]:
    script = Path(__file__).with_name("startup.py")
    environment = {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, str(script), str(task), str(time.time())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    stages: dict[str, float] = json.loads(done.stderr.splitlines()[-1])
    return stages


if __name__ == "__main__":
    sys.exit(main())
