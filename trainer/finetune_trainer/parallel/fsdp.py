"""Workarounds for FSDP2 in accelerate: enable it on CPU, and reshard after a forward pass without backward."""

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, TorchDynamoPlugin
from torch.distributed.fsdp import FSDPModule
from transformers import TrainingArguments


def enable_fsdp_on_cpu(args: TrainingArguments) -> None:
    """Make accelerate use FSDP2 on CPU, where it would silently use DDP. Call it before the Trainer is created."""
    # decisions/511
    if not args.fsdp or PartialState().distributed_type is not DistributedType.MULTI_CPU:
        return
    # Everything is in host memory already; offloading would pin it for a GPU that does not exist.
    plugin = FullyShardedDataParallelPlugin(**{**args.fsdp_plugin_args, "cpu_offload": False})
    precision = "bf16" if args.bf16 else "no"
    if args.bf16:
        plugin.set_mixed_precision(precision)
    state = AcceleratorState(
        mixed_precision=precision,
        cpu=True,
        fsdp_plugin=plugin,
        dynamo_plugin=TorchDynamoPlugin(),
        _from_accelerator=True,
    )
    PartialState().distributed_type = DistributedType.FSDP  # AcceleratorState copies it
    state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin


def reshard(model: torch.nn.Module) -> None:
    """Reshard all layers that a forward pass without backward left gathered, so that parameters are DTensors again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
