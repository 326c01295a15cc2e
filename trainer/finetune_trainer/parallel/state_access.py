"""Select the ModelStateAccess implementation for the sharding of a run."""

from transformers import Trainer

from finetune_api.v1alpha1.training import EIGHT_BIT_ADAMW
from finetune_trainer.parallel.fsdp import reshard
from finetune_trainer.parallel.model_state import EightBitStateAccess, ModelStateAccess, TensorStateAccess


def build_state_access(trainer: Trainer) -> ModelStateAccess:
    """Build the ModelStateAccess of a trainer whose model is already wrapped or sharded."""
    if trainer.is_deepspeed_enabled:
        from finetune_trainer.parallel.deepspeed_engine import ZeroStateAccess  # takes seconds to import

        return ZeroStateAccess(trainer.model_wrapped)
    reshard(trainer.model)
    args = trainer.args
    implementation = EightBitStateAccess if args.optim == EIGHT_BIT_ADAMW else TensorStateAccess
    return implementation(trainer.optimizer, rank=args.process_index, world_size=args.world_size)
