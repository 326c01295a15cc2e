"""Prepare DPO's frozen reference model, sharded like the policy."""

import torch
from accelerate import Accelerator
from accelerate.utils import fsdp2_prepare_model

from finetune_trainer.parallel.autocast_layers import iterate_autocast_layers
from finetune_trainer.parallel.fsdp import protect_buffers


def prepare_reference_model(model: torch.nn.Module, accelerator: Accelerator) -> torch.nn.Module:
    """Freeze the reference model and move it to this rank's device; shard it under ZeRO-3 and FSDP2 only.

    It computes as the policy does, so that rewards are exactly 0 before the first update.
    """
    model.requires_grad_(requires_grad=False).eval()
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    if plugin is not None and plugin.zero_stage == 3:
        return _shard_with_zero3(model, plugin.deepspeed_config["zero_optimization"])
    if getattr(accelerator.state, "fsdp_plugin", None) is not None:
        with protect_buffers(model):
            sharded_model: torch.nn.Module = fsdp2_prepare_model(accelerator, model)
        return sharded_model
    if accelerator.native_amp:
        _use_autocast(model, accelerator)
    return model.to(accelerator.device)


def _use_autocast(model: torch.nn.Module, accelerator: Accelerator) -> None:
    """Let a float32 model run under autocast, and cast those weights once that autocast would cast in each pass."""
    with accelerator.autocast():
        dtype = torch.get_autocast_dtype(accelerator.device.type)
    for layer in iterate_autocast_layers(model):
        layer.to(dtype)
    model.forward = accelerator.autocast()(model.forward)


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
