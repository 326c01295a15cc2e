"""From the start of a rank's process to its first step, by stage: `startup.py TASK.json BEGAN` (Unix seconds)."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

STAGES = {
    ("train", "describe_model"): "config and tokenizer",
    ("train", "load_data"): "rows",
    ("train", "join_process_group"): "process group",
    ("train", "expect_memory"): "memory forecast",
    ("assemble", "load_models"): "model",
    ("assemble", "build_trainer"): "trainer",
}


def main(task_file: str, began: float) -> None:
    """The last line on stderr is a JSON object of seconds."""
    python = time.time() - began
    from finetune_trainer import build_trainer as assemble
    from finetune_trainer import train

    imports = time.time() - began - python
    from benchmarks.trainer import ours
    from benchmarks.trainer.step_timer import watch_every_trainer
    from benchmarks.trainer.task import Task

    spent = dict.fromkeys(STAGES.values(), 0.0)
    for (module, name), stage in STAGES.items():
        add_up_time_in({"train": train, "assemble": assemble}[module], name, spent, stage)
    clock = watch_every_trainer()
    task = Task(**json.loads(Path(task_file).read_text()))
    entered = time.perf_counter()
    ours.train(replace(task, output=f"{task.output}-startup"))
    until_step = clock.steps[0].seconds - entered
    rest = until_step - sum(spent.values())
    stages = {"python": python, "imports": imports, **spent, "rest, with the first step": rest}
    print(json.dumps({**stages, "together": python + imports + until_step}), file=sys.stderr)


def add_up_time_in(module: ModuleType, name: str, spent: dict[str, float], stage: str) -> None:
    """The module's own function takes the time of its calls from now on."""
    inner = getattr(module, name)

    def outer(*arguments: object, **named: object) -> object:
        entered = time.perf_counter()
        result = inner(*arguments, **named)
        spent[stage] += time.perf_counter() - entered
        return result

    setattr(module, name, outer)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
