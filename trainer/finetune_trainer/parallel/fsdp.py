"""FSDP2 config, with workarounds for CPU and for resharding after a forward pass without backward."""

from typing import Any

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, TorchDynamoPlugin
from torch.distributed.fsdp import FSDPModule
from transformers import TrainingArguments

from finetune_api.v1alpha1.job import TrainerSpec


def build_fsdp_config(spec: TrainerSpec) -> dict[str, Any] | None:
    """Build the FSDP2 config for transformers.TrainingArguments, with one FSDP unit per transformer layer."""
    if spec.fsdp is None:
        return None
    return {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "reshard_after_forward": spec.fsdp.reshard_after_forward,
        "cpu_offload": spec.fsdp.cpu_offload,
        "state_dict_type": "FULL_STATE_DICT",
    }


def enable_fsdp_on_cpu(args: TrainingArguments) -> None:
    """Make accelerate use FSDP2 on CPU, where it would silently use DDP (decisions/511).

    Call it before the Trainer is created.
    """
    if not args.fsdp or PartialState().distributed_type is not DistributedType.MULTI_CPU:
        return
    # Without a GPU all states are in host memory already; offloading would only pin them.
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
    PartialState().distributed_type = DistributedType.FSDP  # AcceleratorState copies the type from PartialState
    state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin


def reshard(model: torch.nn.Module) -> None:
    """Reshard the layers that a forward pass without backward left gathered, so that all parameters are DTensors."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
