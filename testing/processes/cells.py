"""Run the small trainings (cells) of the file cells.json in one launch, and write results.json to the same folder.

All cells share one launch, because importing torch and transformers takes ten times as long as such a training. The
launcher of the supervisor calls `prepare` once, and `main` in each rank; TEST_CELLS is the folder.
The name of a cell selects a variant:

- `X (again)`: remove the result of X and run X again.
- `X (from step 2)`: like `(again)`, but also remove the checkpoints after that step.
- `X (damaged after step 2)`: like `(again)`, but also damage the checkpoints after that step.
- `Y <- X`: run spec Y and resume from the first checkpoint of X.
- `X (mixed)`: the last rank reports another GPU model.
- `X (in 900 MiB)`: each rank can allocate only this much memory.
- `X (at most 4 sequences)`: rank 1 runs out of memory above this batch size.
- `X, slow saves`: each rank waits for a second before it writes its part of a checkpoint; training continues.
- `X (in tiles)`: the losses are computed in tiles of a few tokens.
- `X (traced)`: torch.compile traces, but does not generate code, which takes long on a CPU.
- `X (tracked)`: the results contain the bytes allocated by each step.
"""

import faulthandler
import gc
import hashlib
import json
import os
import re
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from accelerate.state import AcceleratorState
from torch._dynamo.utils import counters
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from finetune_api.v1alpha1.job import TrainerSpec
from finetune_supervisor.contract import RunFolder
from finetune_supervisor.launch.rank_process import exit_without_teardown
from finetune_trainer import build_trainer, train
from finetune_trainer.checkpoint.state_files import write_state
from finetune_trainer.data.epoch_order import Item
from finetune_trainer.data.micro_batch import MicroBatch
from finetune_trainer.distributed.collectives import run_on_rank_zero
from finetune_trainer.distributed.hardware_check import RankHardware, describe_rank_hardware
from finetune_trainer.distributed.heartbeat_writer import HeartbeatWriter
from finetune_trainer.distributed.process_group import init_process_group
from finetune_trainer.distributed.rank_context import RankContext
from finetune_trainer.errors import MixedHardware, NonFiniteLoss, TrainerError
from finetune_trainer.memory.run_forecast import forecast_rank_memory
from finetune_trainer.methods.sft import SftTrainer
from finetune_trainer.metrics.throughput import LOGGED_METRICS
from finetune_trainer.model import tiled_losses
from finetune_trainer.model.compiled_layers import compile_layers
from finetune_trainer.training import auto_batch_size, checkpoint_state
from finetune_trainer.training.base_trainer import GlobalMeanTrainer
from finetune_trainer.training.preflight import run_forward_and_backward
from testing.models.allocation_tracker import AllocationCallback, AllocationTracker

MEMORY_VARIANT = re.compile(r" \((in (?P<mib>\d+) MiB|at most (?P<most>\d+) sequences)\)$")
RERUN_VARIANT = re.compile(r" \((again|(from|(?P<damaged>damaged after)) step (?P<step>\d+))\)$")
RESUMED_FROM = " <- "
TILED = " (in tiles)"
SLOW_SAVES = ", slow saves"
SECONDS_BEFORE_WRITE = 1.0  # several steps of a tiny model
SMALL_TILE_BYTES = 4 * 1024 * 23  # 23 tokens of a vocabulary of 1024


def train_cell(name: str, spec: dict[str, Any], folder: Path, context: RankContext) -> dict[str, Any]:
    """Run one training and return its logged metrics and a digest of its weights, or the error that ended it."""
    print(f"rank {context.ranks.rank}: {name}", file=sys.stderr, flush=True)
    reset_global_state()
    uid = name.rpartition(RESUMED_FROM)[2]
    if variant := RERUN_VARIANT.search(name):
        name = uid = name[: variant.start()]
        step = int(variant["step"]) if variant["step"] else None
        change = zero_weights if variant["damaged"] else shutil.rmtree
        run_on_rank_zero(lambda: rewind_output(folder / name, change, last_step=step))
    elif name != uid:
        run_on_rank_zero(lambda: copy_first_checkpoint(folder / uid, folder / name))
    context = replace(context, output=folder / name, uid=uid, job=uid, run=RunFolder(folder / "run"))
    reporter = HeartbeatWriter(context.run.heartbeats, rank=context.ranks.rank, local_rank=context.ranks.local_rank)
    reports_other_gpu = name.endswith("(mixed)") and context.ranks.rank == context.ranks.world_size - 1
    callback = AllocationCallback(AllocationTracker())
    try:
        with (
            track_allocations(callback) if name.endswith("(tracked)") else nullcontext(),
            limit_memory(name, context),
            patch.object(checkpoint_state, write_state.__name__, write_state_later)
            if SLOW_SAVES in name
            else nullcontext(),
            patch.object(build_trainer, compile_layers.__name__, partial(compile_layers, backend="aot_eager"))
            if name.endswith("(traced)")
            else nullcontext(),
            patch.object(tiled_losses, "TILE_BYTES", SMALL_TILE_BYTES) if name.endswith(TILED) else nullcontext(),
            patch.object(
                train,
                describe_rank_hardware.__name__,
                describe_other_gpu if reports_other_gpu else describe_rank_hardware,
            ),
        ):
            train.run(TrainerSpec.model_validate(spec), context, reporter)
    except (
        MixedHardware,
        NonFiniteLoss,
    ) as error:  # these errors are raised on all ranks; other errors may be raised on one rank only
        return {"error": type(error).__name__, "message": str(error)}
    result = folder / name / "result"
    (weights,) = result.glob("*.safetensors")
    log = json.loads((result / "trainer_state.json").read_text())["log_history"]
    log = [entry for entry in log if "train_runtime" not in entry]  # omit the summary, which contains durations
    metric_names = {name for entry in log for name in entry} - {"step", "epoch", *LOGGED_METRICS}
    metrics = {name: [entry[name] for entry in log if name in entry] for name in sorted(metric_names)}
    allocations = {"held_bytes": callback.held_bytes, "peak_bytes": callback.peak_bytes}
    facts = {
        "compiled_graphs": counters["stats"]["unique_graphs"],
        "weights": hashlib.sha256(weights.read_bytes()).hexdigest(),
    }
    return {"eval_loss": [], **metrics, **allocations, **facts}


@contextmanager
def track_allocations(callback: AllocationCallback) -> Iterator[None]:
    def assemble_with_callback(*arguments: Any, **keywords: Any) -> GlobalMeanTrainer:
        trainer = build_trainer.assemble_trainer(*arguments, **keywords)
        trainer.add_callback(callback)
        return trainer

    with patch.object(train, build_trainer.assemble_trainer.__name__, assemble_with_callback), callback.tracker:
        yield


@contextmanager
def limit_memory(name: str, context: RankContext) -> Iterator[None]:
    """Limit memory or batch size as the name of the cell specifies."""
    variant = MEMORY_VARIANT.search(name)
    with ExitStack() as stack:
        if variant and variant["mib"]:
            memory_bytes = int(variant["mib"]) * 2**20
            stack.enter_context(patch.object(build_trainer, "gather_min_rank_memory", return_value=memory_bytes))
        elif variant:
            stack.enter_context(patch.object(build_trainer, "can_run_batch_size_trial", return_value=True))
            if not context.ranks.is_rank_zero:
                limited = limit_sequences(int(variant["most"]))
                stack.enter_context(patch.object(auto_batch_size, limited.__name__, limited))
        yield


def limit_sequences(max_sequences: int) -> Callable[..., None]:
    """Return a trial that runs out of memory with more sequences, each of which is a row, a pack or a completion."""

    @wraps(run_forward_and_backward)
    def run_or_fail(trainer: GlobalMeanTrainer, model: torch.nn.Module, items: Sequence[Item]) -> None:
        if len(items) * (1 if trainer.inputs.plan.spec.dpo is None else 2) > max_sequences:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        run_forward_and_backward(trainer, model, items)

    return run_or_fail


@wraps(write_state)
def write_state_later(*arguments: Any, **keywords: Any) -> list[Path]:
    """Wait, so that training changes the state, and then write the state of a checkpoint."""
    time.sleep(SECONDS_BEFORE_WRITE)
    return write_state(*arguments, **keywords)


def zero_weights(checkpoint: Path) -> None:
    """Replace the last 1,000 bytes of a file by zeros, as storage that loses pages does."""
    file = max((checkpoint / "state").iterdir())
    file.write_bytes(file.read_bytes()[:-1000] + bytes(1000))


def rewind_output(output: Path, change: Callable[[Path], object], *, last_step: int | None) -> None:
    """Remove the result, and change the checkpoints after `last_step`, as if the training had been interrupted."""
    shutil.rmtree(output / "result")
    if last_step is None:
        return
    folders_by_step = {
        int(folder.name.removeprefix("step-")): folder for folder in (output / "checkpoints").glob("step-*")
    }
    assert last_step in folders_by_step, sorted(folders_by_step)
    for step, folder in folders_by_step.items():
        if step > last_step:
            change(folder)


def reset_global_state() -> None:
    """Reset the global state of accelerate, transformers and torch.compile, such as the sharding of the last cell."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    unset_hf_deepspeed_config()
    AcceleratorState._reset_state()
    torch._dynamo.reset()
    counters.clear()
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]


def copy_first_checkpoint(source: Path, target: Path) -> None:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("result"))
    for checkpoint in sorted((target / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(checkpoint)


def describe_other_gpu(device: torch.device) -> RankHardware:
    return replace(describe_rank_hardware(device), device="NVIDIA L4", memory_gib=22)


def slow_down() -> None:
    """Slow this rank down, like a thermally throttled GPU."""
    compute = SftTrainer.sum_losses

    def compute_slowly(trainer: SftTrainer, model: torch.nn.Module, batch: MicroBatch) -> tuple[torch.Tensor, ...]:
        time.sleep(0.15)
        return compute(trainer, model, batch)

    setattr(SftTrainer, compute.__name__, compute_slowly)


def prepare() -> None:
    """Import the libraries, which the imports of this module have done."""


def main() -> None:
    """Run all cells on this rank."""
    faulthandler.enable()  # print the Python stack if a rank crashes
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    gc.freeze()  # same as in finetune_trainer.entrypoint
    folder, context = Path(os.environ["TEST_CELLS"]), RankContext.from_environment(os.environ)
    if os.environ.get("TEST_SLOW_RANK") == str(context.ranks.rank):
        slow_down()
    if "TEST_WITHOUT_FORECASTS" in os.environ:
        setattr(train, forecast_rank_memory.__name__, lambda *_, **__: TrainerError("left out"))
    init_process_group(torch.device("cpu"), timeout_seconds=600)  # before the first cell, which may copy a checkpoint
    cells = json.loads((folder / "cells.json").read_text())
    results = {name: train_cell(name, spec, folder, context) for name, spec in cells.items()}
    if context.ranks.is_rank_zero:
        (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":  # entry point of ranks that the launcher did not fork
    main()
    exit_without_teardown(0)  # threads of collectives may abort during interpreter shutdown
