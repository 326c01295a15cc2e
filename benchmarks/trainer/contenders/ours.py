"""Contender that runs our trainer on one rank, with the environment that torchrun sets."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.trainer.task import EPOCHS, Task
from finetune_api.v1alpha1.job import TrainerSpec
from finetune_supervisor.contract import RunFolder
from finetune_trainer import train as trainer
from finetune_trainer.distributed.heartbeat_writer import HeartbeatWriter
from finetune_trainer.distributed.rank_context import RankContext, Ranks
from finetune_trainer.publish_result import publish_result
from finetune_trainer.training.base_trainer import GlobalMeanTrainer
from testing.processes.cells import reset_global_state
from testing.processes.supervisors import find_free_port

SINGLE_RANK = Ranks(rank=0, local_rank=0, local_world_size=1, world_size=1)


def train(task: Task) -> None:
    """Train without saving anything, and remove the output folder."""
    folder = Path(task.output)
    with skip_saving():
        run_spec(build_spec(task), folder)
    shutil.rmtree(folder)


def run_spec(spec: dict[str, Any], folder: Path) -> None:
    """Run the training of a job with one rank in this process; the result is in `folder/output`."""
    for name, number in (("RANK", 0), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1), ("WORLD_SIZE", 1)):
        os.environ[name] = str(number)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(find_free_port()))
    reset_global_state()
    context = build_rank_context(folder)
    heartbeat = HeartbeatWriter(context.run.heartbeats, rank=0, local_rank=0)
    trainer.run(TrainerSpec.model_validate(spec), context, heartbeat)


@contextmanager
def skip_saving() -> Iterator[None]:
    """Write no checkpoints and no result; those of a full 3B model have 50 GB, which bare machines may not have."""
    with (
        patch.object(GlobalMeanTrainer, "_save_checkpoint", return_value=None),
        patch.object(trainer, publish_result.__name__, return_value=None),
    ):
        yield


def build_rank_context(folder: Path) -> RankContext:
    return RankContext(
        ranks=SINGLE_RANK,
        planned_world_size=1,
        config=folder,
        output=folder / "output",
        cache=folder / "cache",
        run=RunFolder(folder / "run"),
        uid="bench",
        namespace="default",
        job="bench",
        attempt=0,
    )


def build_spec(task: Task) -> dict[str, Any]:
    """Return the spec of a job for this task."""
    quantization = {"quantization": "nf4"} if task.quantization else {}
    return {
        "model": {"name": task.model, "torchDtype": task.dtype},
        "dataset": {
            "train": [{"name": task.rows}],
            "maxLength": task.max_length,
            "packing": task.packing,
            "numWorkers": 0,
        },
        task.method: {},
        **({"lora": {"r": 8, "loraAlpha": 32, **quantization}} if task.lora else {}),
        "training": {
            "perDeviceTrainBatchSize": task.micro_batch_size,
            "gradientAccumulationSteps": task.accumulation_steps,
            "gradientCheckpointing": task.gradient_checkpointing,
            "numTrainEpochs": EPOCHS,
            "learningRate": 1e-4,
            "lrSchedulerType": "constant",
            "saveSteps": 1_000_000,
            "reportTo": ["none"],
        },
        "output": {"persistentVolumeClaim": {"claimName": "unused"}},
    }
