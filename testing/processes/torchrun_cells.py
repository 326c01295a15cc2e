"""Several small trainings in one launch of torchrun, for tests that compare them: `layouts.py CELLS.json RESULTS.json`.

Importing torch and transformers costs ten times what such a training does. A cell called `X (again)` runs X once more
with its result removed; `X (from step 2)` also without the checkpoints after that step. One called `Y <- X` is another
spec that goes on from the first checkpoint of X. In one called `X (mixed)` the last rank says that it has another GPU.
`X (in 900 MiB)` has so much memory per rank; for `X (at most 4 sequences)` the second rank has a GPU, so to say, that
holds no more at a time. Of `X (booked)` the results also tell what its steps allocate.
"""

import gc
import hashlib
import json
import os
import re
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from accelerate.state import AcceleratorState
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from finetune_api.v1alpha1.job import TrainerSpec
from finetune_supervisor.contract import RunFolder
from finetune_supervisor.launch.rank_process import leave
from finetune_trainer import build_trainer as assemble
from finetune_trainer import train
from finetune_trainer.data.token_dataset import Features
from finetune_trainer.distributed.collectives import on_rank_zero
from finetune_trainer.distributed.hardware_check import Computes, describe_rank
from finetune_trainer.distributed.heartbeat_writer import Reporter
from finetune_trainer.distributed.rank_context import Place
from finetune_trainer.errors import MixedHardware, NonFiniteLoss
from finetune_trainer.methods.sft import SftTrainer
from finetune_trainer.metrics.cross_rank import LOGGED
from finetune_trainer.training.base_trainer import ExactTrainer
from testing.models.allocation_tracker import Book, Follow

LITTLE = re.compile(r" \((in (?P<mib>\d+) MiB|at most (?P<most>\d+) sequences)\)$")
AGAIN = re.compile(r" \((again|from step (?P<step>\d+))\)$")
GOES_ON = " <- "


def train_cell(name: str, spec: dict[str, Any], folder: Path, place: Place) -> dict[str, Any]:
    """The log of one training and a digest of its weights, or the loss that ended it."""
    print(f"rank {place.ranks.rank}: {name}", file=sys.stderr, flush=True)
    forget_the_cell_before()
    uid = name.rpartition(GOES_ON)[2]
    if again := AGAIN.search(name):
        name = uid = name[: again.start()]
        step = int(again["step"]) if again["step"] else None
        on_rank_zero(lambda: undo(folder / name, to_step=step))
    elif name != uid:
        on_rank_zero(lambda: copy_first_checkpoint(folder / uid, folder / name))
    place = replace(place, output=folder / name, uid=uid, job=uid, run=RunFolder(folder / "run"))
    reporter = Reporter(place.run.heartbeats, rank=place.ranks.rank, local_rank=place.ranks.local_rank)
    says_otherwise = name.endswith("(mixed)") and place.ranks.rank == place.ranks.world_size - 1
    follow = Follow(Book())
    try:
        with (
            booked(follow) if name.endswith("(booked)") else nullcontext(),
            little_memory(name, place),
            patch.object(train, describe_rank.__name__, of_another_gpu if says_otherwise else describe_rank),
        ):
            train.run(TrainerSpec.model_validate(spec), place, reporter)
    except (MixedHardware, NonFiniteLoss) as error:  # which all ranks see; of another the rest may not know, and wait
        return {"error": type(error).__name__, "message": str(error)}
    result = folder / name / "result"
    (weights,) = result.glob("*.safetensors")
    log = json.loads((result / "trainer_state.json").read_text())["log_history"]
    log = [entry for entry in log if "train_runtime" not in entry]  # the summary, which tells the time
    named = {name for entry in log for name in entry} - {"step", "epoch", *LOGGED}
    told = {name: [entry[name] for entry in log if name in entry] for name in sorted(named)}
    booked_bytes = {"held": follow.held, "highest": follow.highest}
    return {"eval_loss": [], **told, **booked_bytes, "weights": hashlib.sha256(weights.read_bytes()).hexdigest()}


@contextmanager
def booked(follow: Follow) -> Iterator[None]:
    def build_and_follow(*arguments: Any, **named: Any) -> ExactTrainer:
        trainer = assemble.assemble(*arguments, **named)
        trainer.add_callback(follow)
        return trainer

    with patch.object(train, assemble.assemble.__name__, build_and_follow), follow.book:
        yield


@contextmanager
def little_memory(name: str, place: Place) -> Iterator[None]:
    """As the cell's name says."""
    little = LITTLE.search(name)
    with ExitStack() as stack:
        if little and little["mib"]:
            there = int(little["mib"]) * 2**20
            stack.enter_context(patch.object(assemble, "memory_of_a_rank", return_value=there))
        elif little:
            stack.enter_context(patch.object(assemble, "is_measurable", return_value=True))
            if not place.ranks.is_first:
                most = int(little["most"])
                stack.enter_context(patch.object(torch.nn.Embedding, "forward", embedding_of_at_most(most)))
        yield


def embedding_of_at_most(most: int) -> Callable[[torch.nn.Embedding, torch.Tensor], torch.Tensor]:
    embed = torch.nn.Embedding.forward

    def embed_or_fail(embedding: torch.nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        if len(ids) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return embed(embedding, ids)

    return embed_or_fail


def undo(output: Path, *, to_step: int | None) -> None:
    """As if the training had ended before its result was published, or at a step that it has a checkpoint of."""
    shutil.rmtree(output / "result")
    if to_step is None:
        return
    by_step = {int(folder.name.removeprefix("step-")): folder for folder in (output / "checkpoints").glob("step-*")}
    assert to_step in by_step, sorted(by_step)
    for step, folder in by_step.items():
        if step > to_step:
            shutil.rmtree(folder)


def forget_the_cell_before() -> None:
    """When every rank is done with it. What accelerate and transformers keep tells how weights are spread."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    unset_hf_deepspeed_config()
    AcceleratorState._reset_state()
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]


def copy_first_checkpoint(source: Path, target: Path) -> None:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("result"))
    for later in sorted((target / "checkpoints").iterdir())[1:]:
        shutil.rmtree(later)


def of_another_gpu(device: torch.device) -> Computes:
    return replace(describe_rank(device), device="NVIDIA L4", memory_gib=22)


def slow_down() -> None:
    """As a GPU that is too hot would."""
    compute = SftTrainer.summed_losses

    def slow(trainer: SftTrainer, model: torch.nn.Module, batch: Features) -> tuple[torch.Tensor, ...]:
        time.sleep(0.15)
        return compute(trainer, model, batch)

    setattr(SftTrainer, compute.__name__, slow)


def main(cells_file: Path, results_file: Path) -> None:
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    gc.freeze()  # as `finetune_trainer.entrypoint` does
    place = Place.from_environment(os.environ)
    if os.environ.get("TEST_SLOW_RANK") == str(place.ranks.rank):
        slow_down()
    cells = json.loads(cells_file.read_text())
    results = {name: train_cell(name, spec, results_file.parent, place) for name, spec in cells.items()}
    if place.ranks.is_first:
        results_file.write_text(json.dumps(results))
    print(f"rank {place.ranks.rank}: done", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    leave(0)  # as ranks of the trainer do: threads of collectives may abort one that takes its interpreter down
