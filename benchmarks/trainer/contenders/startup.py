"""Measures the duration of each startup stage of a rank until its first step.

Usage: `startup.py TASK.json STARTED_AT` (Unix time).
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

STAGES = {
    ("train", "describe_model"): "config and tokenizer",
    ("train", "load_data"): "rows",
    ("train", "init_process_group"): "process group",
    ("train", "forecast_rank_memory"): "memory forecast",
    ("build_trainer", "load_models"): "model",
    ("build_trainer", "build_trainer"): "trainer",
}


def main(task_file: str, started_at: float) -> None:
    """Print a JSON object with the duration of each stage in seconds as the last line on stderr."""
    interpreter_seconds = time.time() - started_at
    from finetune_trainer import build_trainer, train

    import_seconds = time.time() - started_at - interpreter_seconds
    from benchmarks.trainer.contenders import ours
    from benchmarks.trainer.contenders.step_timer import install_step_timer
    from benchmarks.trainer.task import Task

    stage_seconds = dict.fromkeys(STAGES.values(), 0.0)
    for (module, name), stage in STAGES.items():
        measure_calls({"train": train, "build_trainer": build_trainer}[module], name, stage_seconds, stage)
    timer = install_step_timer()
    task = Task(**json.loads(Path(task_file).read_text()))
    entered_at = time.perf_counter()
    ours.train(replace(task, output=f"{task.output}-startup"))
    first_step_seconds = timer.steps[0].seconds - entered_at
    remaining_seconds = first_step_seconds - sum(stage_seconds.values())
    stages = {
        "python": interpreter_seconds,
        "imports": import_seconds,
        **stage_seconds,
        "other, including the first step": remaining_seconds,
    }
    print(json.dumps({**stages, "total": interpreter_seconds + import_seconds + first_step_seconds}), file=sys.stderr)


def measure_calls(module: ModuleType, name: str, stage_seconds: dict[str, float], stage: str) -> None:
    """Wrap a function of the module, so that the duration of its calls is added to the stage."""
    original = getattr(module, name)

    def timed_call(*arguments: object, **keywords: object) -> object:
        entered_at = time.perf_counter()
        result = original(*arguments, **keywords)
        stage_seconds[stage] += time.perf_counter() - entered_at
        return result

    setattr(module, name, timed_call)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
