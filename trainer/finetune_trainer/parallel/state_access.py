"""Selects the implementation of FullStateAccess (ZeRO, or FSDP2 and DDP) that fits the sharding of a run."""

from transformers import Trainer

from finetune_trainer.parallel.fsdp import reshard
from finetune_trainer.parallel.full_state import FullStateAccess, TensorStateAccess


def build_state_access(trainer: Trainer) -> FullStateAccess:
    """Return the access to full weights and moments of a trainer whose model is wrapped or sharded already."""
    if trainer.is_deepspeed_enabled:
        from finetune_trainer.parallel.deepspeed_engine import ZeroStateAccess  # takes seconds to import

        return ZeroStateAccess(trainer.model_wrapped)
    reshard(trainer.model)
    return TensorStateAccess(trainer.optimizer)
