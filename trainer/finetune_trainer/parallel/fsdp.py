"""What FSDP2 needs beside accelerate: to be taken on CPU too, and pieces where tensors are asked for."""

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, TorchDynamoPlugin
from torch.distributed.fsdp import FSDPModule
from transformers import TrainingArguments


def spread_on_cpu(args: TrainingArguments) -> None:
    """Before accelerate looks: for ranks without GPUs it would take DDP instead, and say nothing."""
    if not args.fsdp or PartialState().distributed_type is not DistributedType.MULTI_CPU:
        return
    # all is in host memory already; to offload it would be pinned for a GPU that is not there
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
    PartialState().distributed_type = DistributedType.FSDP  # every later look at the state begins with this one
    state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin


def reshard(model: torch.nn.Module) -> None:
    """What a forward pass without a backward pass leaves whole are no parameters that the optimizer knows."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
