"""Save and restore checkpoints: weights, optimizer, scheduler, scaler, trainer state and random states of all ranks.

The format does not depend on the sharding; transformers has a separate format for each kind of sharding.
"""

import math
from pathlib import Path

import torch
from transformers import Trainer, TrainerState

from finetune_trainer.checkpoint.checkpoints import parse_checkpoint_step
from finetune_trainer.checkpoint.random_state import get_random_state_path, random_state, restore_random_state
from finetune_trainer.distributed.collectives import gather_on_rank_zero, run_on_rank_zero
from finetune_trainer.errors import CheckpointCorrupt
from finetune_trainer.model.save import save_weights
from finetune_trainer.parallel.full_state import READ_ERRORS, extract_weights, gather_state, restore_state, write_state
from finetune_trainer.parallel.state_access import build_state_access
from finetune_trainer.training.trainer_inputs import TrainerInputs

_STATE_FILE = "trainer_state.json"
_SCHEDULER_FILE = "scheduler.pt"
_SAVES_IN_GRACE_PERIOD = 3  # multiple of the time of a save; shared storage may be slower when all jobs stop


def save_checkpoint(trainer: Trainer, inputs: TrainerInputs, *, retained_step: int | None) -> str:
    """Save a checkpoint and return its name (collective).

    Rank 0 writes all files, including those of other ranks, so that one rename publishes the checkpoint.
    retained_step: the checkpoint of this step is never pruned.
    """
    random_states = gather_on_rank_zero(random_state())
    full_state = gather_state(trainer.model, build_state_access(trainer), keep_result=inputs.ranks.is_rank_zero)
    step, world_size = trainer.state.global_step, inputs.ranks.world_size

    def write_checkpoint(folder: Path) -> None:
        write_state(full_state, folder)
        if hasattr(trainer.model, "peft_config"):  # save adapters separately, in the format that peft loads
            save_weights(trainer.model, extract_weights(full_state), folder)
        torch.save(trainer.lr_scheduler.state_dict(), folder / _SCHEDULER_FILE)
        trainer._save_scaler(str(folder))
        trainer.state.save_to_json(str(folder / _STATE_FILE))
        for rank, state in enumerate(random_states):
            torch.save(state, get_random_state_path(folder, rank))

    return run_on_rank_zero(
        lambda: inputs.checkpoints.save(step, world_size, write_checkpoint, retained_step=retained_step)
    )


def describe_save(name: str, seconds: float, *, grace_seconds: int) -> str:
    """Return the log line about a saved checkpoint, with a warning if a stopped job may have too little time for one.

    grace_seconds: terminationGracePeriodSeconds of the job.
    """
    line, needed_seconds = f"checkpoint: {name} saved in {seconds:.1f} s", math.ceil(_SAVES_IN_GRACE_PERIOD * seconds)
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
    try:
        restore_state(trainer.model, build_state_access(trainer), checkpoint, step=parse_checkpoint_step(checkpoint))
        scheduler = torch.load(checkpoint / _SCHEDULER_FILE, weights_only=True)
        trainer.lr_scheduler.load_state_dict(scheduler)
        for group, rate in zip(trainer.optimizer.param_groups, trainer.lr_scheduler.get_last_lr(), strict=True):
            group["lr"] = rate  # the scheduler would set this rate only after its next step
    except READ_ERRORS as error:
        raise CheckpointCorrupt(
            f"{checkpoint} cannot be loaded ({error}); delete it to resume from the one before"
        ) from error
    trainer._load_scaler(str(checkpoint))


def restore_rank_random_state(checkpoint: Path, *, rank: int) -> None:
    """Restore the random generators of a rank, if their state was saved; otherwise only the dropout masks differ."""
    path = get_random_state_path(checkpoint, rank)
    if path.is_file():
        restore_random_state(torch.load(path, weights_only=True))


def load_trainer_state(checkpoint: Path) -> TrainerState:
    """Return the trainer state of a checkpoint: its step and log history."""
    return TrainerState.load_from_json(str(checkpoint / _STATE_FILE))
