"""Select the FullStateAccess implementation for the sharding of a run."""

from transformers import Trainer

from finetune_trainer.parallel.fsdp import reshard
from finetune_trainer.parallel.full_state import FullStateAccess, TensorStateAccess


def build_state_access(trainer: Trainer) -> FullStateAccess:
    """Build the FullStateAccess of a trainer whose model is already wrapped or sharded."""
    if trainer.is_deepspeed_enabled:
        from finetune_trainer.parallel.deepspeed_engine import ZeroStateAccess  # takes seconds to import

        return ZeroStateAccess(trainer.model_wrapped)
    reshard(trainer.model)
    return TensorStateAccess(trainer.optimizer)
