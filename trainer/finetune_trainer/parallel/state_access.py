"""Select the ModelStateAccess implementation for the sharding of a run."""

from transformers import Trainer

from finetune_trainer.parallel.fsdp import reshard
from finetune_trainer.parallel.model_state import ModelStateAccess, TensorStateAccess


def build_state_access(trainer: Trainer) -> ModelStateAccess:
    """Build the ModelStateAccess of a trainer whose model is already wrapped or sharded."""
    if trainer.is_deepspeed_enabled:
        from finetune_trainer.parallel.deepspeed_engine import ZeroStateAccess  # takes seconds to import

        return ZeroStateAccess(trainer.model_wrapped)
    reshard(trainer.model)
    args = trainer.args
    return TensorStateAccess(trainer.optimizer, rank=args.process_index, world_size=args.world_size)
