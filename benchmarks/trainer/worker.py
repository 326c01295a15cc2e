"""A contender's process: `python -m benchmarks.trainer.worker NAME` reads a task a line and answers with a line.

It runs in the contender's own environment, as long as the contest, because importing takes as long as a training.
"""

import gc
import importlib
import json
import os
import sys
from dataclasses import asdict

import torch
import transformers

from benchmarks.trainer.step_timer import watch_every_trainer
from benchmarks.trainer.task import Answer, Task

CONTENDERS = {"ours": "ours", "TRL": "trl_peer", "ms-swift": "swift_peer"}


def main(name: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever trainers print is no answer
    train = importlib.import_module(f"benchmarks.trainer.{CONTENDERS[name]}").train
    transformers.utils.logging.disable_progress_bar()
    for line in sys.stdin:
        clock = watch_every_trainer()
        try:
            train(Task(**json.loads(line)))
            answer = clock.answer()
        except (Exception, SystemExit) as error:  # whatever it is, it is this contender's answer
            answer = Answer(error=describe(error))
        print(json.dumps(asdict(answer)), file=answers, flush=True)
        forget()


def describe(error: BaseException) -> str:
    """The first line that says something."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip() if lines else 'no message'}"


def forget() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main(sys.argv[1])
