"""`make bench-gpu`: real shapes with random weights on one GPU, beside TRL; and a job that runs out of memory and fits.

`--small` takes small models and the CPU, where memory runs out because testing/fakes/inject says so.
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

from benchmarks.trainer.cases import ON_GPU, RUNS_OUT, Machine, prepare, prepare_all, shrink
from benchmarks.trainer.comparison import OURS, PATHS, REPOSITORY, Case, Contender, hold
from benchmarks.trainer.ours import spec_of
from benchmarks.trainer.report import describe_case
from finetune_trainer.metrics.flops import peak_flops
from testing.processes.local_mode import LocalJob, job_body, write_body

INJECTED = {
    "PYTHONPATH": os.pathsep.join((str(REPOSITORY / "testing/fakes/inject"), PATHS)),
    "MOST_SAMPLES": "1",
    "FINE_PASSES": "2",
}
PATIENCE_SECONDS = 1800


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Our trainer at real shapes on one GPU, beside TRL.")
    parser.add_argument("--rounds", type=int, default=3, help="how often each trains each case (default 3)")
    parser.add_argument("--only", default="", help="cases whose title has this in it")
    parser.add_argument("--small", action="store_true", help="small models on CPU: shows that everything is connected")
    options = parser.parse_args(arguments)
    if not options.small and not torch.cuda.is_available():
        print("no CUDA device: nothing was measured")
        return 0
    machine = (
        Machine("float32", "cpu", forecasts=True) if options.small else Machine("bfloat16", "cuda", forecasts=True)
    )
    print(describe_device(machine))
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as scratch:
        folder = Path(scratch)
        runs = [shrink(run) if options.small else run for run in ON_GPU if options.only in run.title]
        for case in prepare_all(runs, folder / "cases", machine):
            race(case, rounds=options.rounds)
        if options.only in RUNS_OUT.title:
            run = shrink(RUNS_OUT) if options.small else RUNS_OUT
            case = prepare(run, folder / "runs-out", machine)
            print("\n".join(run_out(case, folder / "job", INJECTED if options.small else {})))
    return 0


def describe_device(machine: Machine) -> str:
    if machine.device == "cpu":
        return f"CPU, torch {torch.__version__}"
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"


def race(case: Case, *, rounds: int) -> None:
    """Each in a process that has the GPU to itself."""
    on_gpu = case.task.on_gpu
    threads = torch.get_num_threads()
    contenders = {name: Contender(name, Path(sys.executable), threads=threads) for name in (OURS, "TRL")}
    outcomes = hold(case, contenders, rounds=rounds, fresh=on_gpu)
    for contender in contenders.values():
        contender.close()
    peak = peak_flops(torch.cuda.get_device_name(), getattr(torch, case.task.dtype)) if on_gpu else None
    print("\n".join(describe_case(case, outcomes, peak_flops=peak)), flush=True)


def run_out(case: Case, folder: Path, env: dict[str, str]) -> list[str]:
    """What `finetune run` makes of micro-batches that do not fit."""
    spec: dict[str, Any] = spec_of(case.task)
    spec["training"] |= {"maxSteps": 3}
    del spec["training"]["numTrainEpochs"]
    spec["env"] = [{"name": name, "value": value} for name, value in env.items()]
    job = write_body(folder, job_body(spec), {})
    process = job.start()
    try:
        said, _ = process.communicate(timeout=PATIENCE_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
    return [f"{case.title}: exit code {process.returncode}", *describe_attempts(job), said.splitlines()[-1]]


def describe_attempts(job: LocalJob) -> list[str]:
    attempts = [
        f"  attempt {each.attempt}: {each.reason or each.state}: {each.message}" for each in job.status.attempts
    ]
    return [*attempts, f"  batch: {job.status.batch}"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
