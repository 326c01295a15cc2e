"""Save and restore checkpoints: weights, optimizer, scheduler, scaler, trainer state and random states of all ranks.

The format does not depend on the sharding; transformers has a separate format for each kind of sharding.
"""

import copy
import math
import time
from collections import ChainMap
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import Trainer, TrainerState
from transformers.trainer import SCALER_NAME

from finetune_trainer.checkpoint.manifest import parse_checkpoint_step
from finetune_trainer.checkpoint.random_state import get_random_state_path, random_state, restore_random_state
from finetune_trainer.checkpoint.state_files import READ_ERRORS, StateReader, write_state
from finetune_trainer.distributed.collectives import all_gather_objects
from finetune_trainer.errors import CheckpointCorrupt
from finetune_trainer.model.save import save_weights
from finetune_trainer.parallel.model_state import (
    TensorRange,
    Tensors,
    gather_weights,
    iterate_saved_ranges,
    restore_state,
)
from finetune_trainer.parallel.state_access import build_state_access
from finetune_trainer.storage_faults import check_is_about_content
from finetune_trainer.training.checkpoint_saver import CheckpointPart, SavedCheckpoint
from finetune_trainer.training.trainer_inputs import TrainerInputs

_STATE_FILE = "trainer_state.json"
_SCHEDULER_FILE = "scheduler.pt"
_SKIPS_FILE = "skipped-rows.pt"  # only if rows were skipped during training
_SAVES_IN_GRACE_PERIOD = 3  # multiple of the time of a save; shared storage may be slower when all jobs stop


def stage_checkpoint(
    trainer: Trainer, inputs: TrainerInputs, *, copies_state: bool, retained_step: int | None
) -> CheckpointPart:
    """Prepare this rank's part of a checkpoint of the current state (collective).

    copies_state: whether training may change the state before the part is written.
    retained_step: the checkpoint of this step is never pruned.
    """
    started_at = time.monotonic()
    rank, generators, access = inputs.ranks.rank, random_state(), build_state_access(trainer)
    staged = copy_to_host(iterate_saved_ranges(trainer.model, access)) if copies_state else None
    has_adapters = hasattr(trainer.model, "peft_config")
    adapters = gather_weights(trainer.model, access, keep_result=inputs.ranks.is_rank_zero) if has_adapters else {}
    small_states = {_SCHEDULER_FILE: copy.deepcopy(trainer.lr_scheduler.state_dict())}
    if scaler := getattr(trainer.accelerator, "scaler", None):
        small_states[SCALER_NAME] = copy.deepcopy(scaler.state_dict())
    if inputs.data.vision:  # all ranks skip the rows that one of them has found
        inputs.data.skips.rows |= ChainMap(*all_gather_objects(inputs.data.skips.rows))
    if inputs.data.skips.rows:
        small_states[_SKIPS_FILE] = dict(inputs.data.skips.rows)
    trainer_state = copy.deepcopy(trainer.state)

    def write_files(folder: Path) -> list[Path]:
        ranges = staged.items() if staged is not None else iterate_saved_ranges(trainer.model, access)
        paths = write_state(ranges, folder, rank=rank)
        torch.save(generators, get_random_state_path(folder, rank))
        paths.append(get_random_state_path(folder, rank))
        if not inputs.ranks.is_rank_zero:
            return paths
        for name, state in small_states.items():
            torch.save(state, folder / name)
        trainer_state.save_to_json(str(folder / _STATE_FILE))
        paths += [folder / name for name in (*small_states, _STATE_FILE)]
        return paths + (write_adapter(trainer.model, adapters, folder) if adapters else [])

    seconds = time.monotonic() - started_at
    return CheckpointPart(trainer_state.global_step, write_files, retained_step, staging_seconds=seconds)


def copy_to_host(ranges: Iterable[tuple[str, TensorRange]]) -> dict[str, TensorRange]:
    """Copy ranges to host memory, from which a thread can write them while training changes the originals."""
    return {
        key: TensorRange(tensor_range.start, tensor_range.values.to("cpu", copy=True)) for key, tensor_range in ranges
    }


def write_adapter(model: torch.nn.Module, weights: Tensors, folder: Path) -> list[Path]:
    """Write the adapter in the format that peft loads, and return the paths of its files."""
    with TemporaryDirectory(dir=folder, prefix=".adapter-") as temporary:
        save_weights(model, weights, Path(temporary))
        return [path.rename(folder / path.name) for path in Path(temporary).iterdir()]


def describe_save(saved: SavedCheckpoint, *, grace_seconds: int) -> str:
    """Return the log line about a saved checkpoint, with a warning if a stopped job may have too little time for one.

    grace_seconds: terminationGracePeriodSeconds of the job.
    """
    line = f"checkpoint: {saved.name} saved in {saved.seconds:.1f} s, training waited {saved.waited_seconds:.1f} s"
    needed_seconds = math.ceil(_SAVES_IN_GRACE_PERIOD * saved.seconds)
    if needed_seconds <= grace_seconds:
        return line
    return (
        f"{line}; warning: a job that is stopped has {grace_seconds} s for its current step and a checkpoint; set"
        f" spec.terminationGracePeriodSeconds to at least {needed_seconds}"
    )


def restore_checkpoint(trainer: Trainer, checkpoint: Path) -> None:
    """Restore weights, optimizer, scheduler and scaler into a prepared trainer (collective).

    Raises CheckpointCorrupt if files are damaged or do not match the model.
    """
    access, step = build_state_access(trainer), parse_checkpoint_step(checkpoint)
    try:
        restore_state(trainer.model, access, StateReader(checkpoint).read, step=step)
        _restore_schedule(trainer, torch.load(checkpoint / _SCHEDULER_FILE, weights_only=True)["last_epoch"])
        if (checkpoint / _SKIPS_FILE).is_file():
            trainer.inputs.data.skips.rows |= torch.load(checkpoint / _SKIPS_FILE, weights_only=True)
    except READ_ERRORS as error:
        check_is_about_content(error, f"{checkpoint} cannot be read")
        raise CheckpointCorrupt(
            f"{checkpoint} cannot be loaded ({error}); move it to another folder to resume from the one before"
        ) from error
    trainer._load_scaler(str(checkpoint))


def _restore_schedule(trainer: Trainer, step: int) -> None:
    """Set the learning rates after `step` steps of the schedule.

    The other values of a saved schedule belong to the parameter groups of the run that saved it: DeepSpeed removes
    empty groups, such as the weights without decay of LoRA.
    """
    schedule = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)  # accelerate wraps it
    rates = [rate * factor(step) for rate, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    schedule.load_state_dict({**schedule.state_dict(), "last_epoch": step, "_step_count": step + 1, "_last_lr": rates})
    for group, rate in zip(trainer.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate  # the schedule would set this rate only after its next step


def restore_rank_random_state(checkpoint: Path, *, rank: int) -> None:
    """Restore the random generators of a rank, if their state was saved; otherwise only the dropout masks differ."""
    path = get_random_state_path(checkpoint, rank)
    if path.is_file():
        restore_random_state(torch.load(path, weights_only=True))


def load_trainer_state(checkpoint: Path) -> TrainerState:
    """Return the trainer state of a checkpoint: its step and log history."""
    return TrainerState.load_from_json(str(checkpoint / _STATE_FILE))
