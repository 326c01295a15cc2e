"""Prepare DPO's frozen reference model, sharded like the policy."""

import torch
from accelerate import Accelerator
from accelerate.utils import fsdp2_prepare_model

from finetune_trainer.parallel.fsdp import protect_buffers


def prepare_reference_model(model: torch.nn.Module, accelerator: Accelerator) -> torch.nn.Module:
    """Freeze the reference model and move it to this rank's device; shard it under ZeRO-3 and FSDP2 only."""
    model.requires_grad_(requires_grad=False).eval()
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    if plugin is not None and plugin.zero_stage == 3:
        return _shard_with_zero3(model, plugin.deepspeed_config["zero_optimization"])
    if getattr(accelerator.state, "fsdp_plugin", None) is not None:
        with protect_buffers(model):
            sharded_model: torch.nn.Module = fsdp2_prepare_model(accelerator, model)
        return sharded_model
    return model.to(accelerator.device)


def _shard_with_zero3(model: torch.nn.Module, policy_config: dict[str, object]) -> torch.nn.Module:
    """Create a DeepSpeed engine without optimizer, with the weight offloading of the policy's config."""
    import deepspeed  # takes seconds to import

    zero: dict[str, object] = {"stage": 3}
    if "offload_param" in policy_config:
        zero["offload_param"] = policy_config["offload_param"]
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    engine: torch.nn.Module
    engine, *_ = deepspeed.initialize(model=model, config=config)
    return engine
