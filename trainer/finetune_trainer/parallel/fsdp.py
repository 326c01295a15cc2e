"""FSDP2 config, with workarounds for CPU and for resharding after a forward pass without backward."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, TorchDynamoPlugin
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from transformers import TrainingArguments

from finetune_api.v1alpha1.job import TrainerSpec
from finetune_trainer.parallel.model_state import find_saved_buffers


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
        "cpu_ram_efficient_loading": True,  # accelerate distributes the weights of rank 0
    }


def enable_fsdp_on_cpu(args: TrainingArguments) -> None:
    """Make accelerate use FSDP2 on CPU, where it would silently use DDP (decisions/511).

    Call it before the Trainer is created.
    """
    if not args.fsdp or PartialState().distributed_type is not DistributedType.MULTI_CPU:
        return
    plugin = FullyShardedDataParallelPlugin(**args.fsdp_plugin_args)
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # pinned memory needs a GPU
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


def reduce_gradients_in_float32(accelerator: Accelerator) -> None:
    """Let FSDP2 reduce and accumulate gradients in float32; accelerate would use the dtype of the forward pass.

    Call it before the model is sharded.
    """
    plugin = accelerator.state.fsdp_plugin
    if plugin.mixed_precision_policy is not None:
        plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, reduce_dtype=torch.float32)


def select_sharded_layers(model: Any, accelerator: Accelerator) -> None:
    """Name the classes of layers that FSDP2 shards one by one: those of the model that transformers never splits.

    A class of models may also name layers of other text and vision parts than this model has, which accelerate rejects.
    Call it before the model is sharded.
    """
    classes = {type(module).__name__ for module in model.modules()}
    plugin = accelerator.state.fsdp_plugin
    plugin.transformer_cls_names_to_wrap = sorted(classes.intersection(model._no_split_modules or ()))


@contextmanager
def protect_buffers(model: torch.nn.Module) -> Iterator[None]:
    """Declare all buffers of the model as non-persistent while accelerate shards it.

    accelerate distributes all persistent tensors as parameters, which fails for buffers.
    """
    saved_buffers = tuple(find_saved_buffers(model))
    for _, module, name in saved_buffers:
        module._non_persistent_buffers_set.add(name)
    yield
    for _, module, name in saved_buffers:
        module._non_persistent_buffers_set.discard(name)


@contextmanager
def protect_tied_weights(model: torch.nn.Module) -> Iterator[None]:
    """Tie weights by their present names while accelerate shards the model and calls `tie_weights`.

    transformers would assign the weight of an output layer to the adapter that wraps it, which raises KeyError.
    """
    names: dict[torch.nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    groups = tuple(group for group in names.values() if len(group) > 1)

    def tie_weights() -> None:
        for source, *targets in groups:
            for target in targets:
                module, _, name = target.rpartition(".")
                setattr(model.get_submodule(module), name, model.get_parameter(source))

    model.tie_weights = tie_weights  # type: ignore[assignment]
    yield
    del model.tie_weights


def reshard(model: torch.nn.Module) -> None:
    """Reshard the layers that a forward pass without backward left gathered, so that all parameters are DTensors."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
