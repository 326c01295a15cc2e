"""A model that is only asked, spread like the one that is trained."""

import torch
from accelerate import Accelerator
from accelerate.utils import fsdp2_prepare_model


def spread_frozen(model: torch.nn.Module, accelerator: Accelerator) -> torch.nn.Module:
    """On this rank's device, whole under DDP and ZeRO-1 and -2, in pieces where the weights are."""
    model.requires_grad_(requires_grad=False).eval()
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    if plugin is not None and plugin.zero_stage == 3:
        return _under_zero3(model, plugin.deepspeed_config["zero_optimization"])
    if getattr(accelerator.state, "fsdp_plugin", None) is not None:
        spread: torch.nn.Module = fsdp2_prepare_model(accelerator, model)
        return spread
    return model.to(accelerator.device)


def _under_zero3(model: torch.nn.Module, asked: dict[str, object]) -> torch.nn.Module:
    """Where the weights lie is the only thing that is asked of a model without an optimizer."""
    import deepspeed  # takes seconds to import

    zero = {"stage": 3, **({"offload_param": asked["offload_param"]} if "offload_param" in asked else {})}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    engine: torch.nn.Module
    engine, *_ = deepspeed.initialize(model=model, config=config)
    return engine
