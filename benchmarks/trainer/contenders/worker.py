"""Process of a contender: `python -m benchmarks.trainer.contenders.worker NAME` reads tasks and writes measurements.

The process runs in the environment of the contender until the comparison ends, because imports take as long as a run.
"""

import gc
import importlib
import json
import os
import sys
from contextlib import nullcontext
from dataclasses import asdict, replace

import torch
import transformers

from benchmarks.trainer.contenders.attention_recorder import AttentionRecorder
from benchmarks.trainer.contenders.step_timer import install_step_timer
from benchmarks.trainer.task import Measurement, Task
from testing.models.allocation_tracker import AllocationTracker

CONTENDERS = {"ours": "ours", "TRL": "trl_peer", "ms-swift": "swift_peer"}


def main(name: str) -> None:
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # redirect the output of the trainers, which must not mix with the measurements
    train = importlib.import_module(f"benchmarks.trainer.contenders.{CONTENDERS[name]}").train
    transformers.utils.logging.disable_progress_bar()
    recorder = AttentionRecorder()
    recorder.install()
    for line in sys.stdin:
        task = Task(**json.loads(line))
        tracker = AllocationTracker() if task.counts_tensors else None
        timer = install_step_timer(tracker)
        recorder.clear()
        try:
            with tracker or nullcontext():
                train(task)
            measurement = replace(timer.build_measurement(), attention=recorder.describe())
        except (Exception, SystemExit) as error:  # every error is reported as the result of this contender
            measurement = Measurement(error=describe_error(error))
        print(json.dumps(asdict(measurement)), file=output, flush=True)
        free_memory()


def describe_error(error: BaseException) -> str:
    """Return the type of the error and the first non-empty line of its message."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip() if lines else 'no message'}"


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main(sys.argv[1])
