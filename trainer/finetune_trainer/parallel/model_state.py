"""Access the weights and optimizer states of trained parameters, independent of their sharding (decisions/509).

Each rank holds a contiguous range of the elements of a parameter, in the order of the flattened parameter: with DDP
all of them, with FSDP2 and ZeRO its shard. Checkpoints consist of such ranges.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

WEIGHT = "weight"
MOMENTS = ("exp_avg", "exp_avg_sq")  # state names of torch's AdamW
KINDS = (WEIGHT, *MOMENTS)
# State names of the 8-bit AdamW of bitsandbytes; the moments of small tensors and embeddings have no scales.
_EIGHT_BIT_MOMENTS = ("state1", "state2")
_SCALES = ("absmax1", "absmax2")

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class TensorRange:
    """Values of the elements of a flattened tensor from index `start`; one-dimensional, possibly empty."""

    start: int
    values: torch.Tensor


# Returns the elements from `start` to `stop` of the flattened tensor of this kind or key, in host memory.
ReadRange = Callable[[str, int, int], torch.Tensor]


class ModelStateAccess(Protocol):
    """Interface to the state of a sharded model, with an implementation for each kind of sharding."""

    def gather_weight(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return the full, unsharded weight (collective)."""

    def iterate_saved_ranges(self, parameter: torch.nn.Parameter) -> Iterator[tuple[str, TensorRange]]:
        """Yield the ranges that this rank saves, by kind; the ranges of all ranks cover each element once."""

    def restore(self, parameter: torch.nn.Parameter, read: ReadRange, *, step: int) -> None:
        """Set weight, moments and step count of a parameter; reads what this rank holds."""


class TensorStateAccess:
    """Implements ModelStateAccess for DDP, with plain tensors, and for FSDP2, with DTensors."""

    def __init__(self, optimizer: Any, *, rank: int, world_size: int) -> None:
        self._optimizer: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
        self._rank = rank
        self._world_size = world_size

    def gather_weight(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return the full, unsharded weight (collective)."""
        weight = parameter.detach()
        return weight.full_tensor().cpu() if isinstance(weight, DTensor) else weight

    def iterate_saved_ranges(self, parameter: torch.nn.Parameter) -> Iterator[tuple[str, TensorRange]]:
        """Yield this rank's shard, or with DDP an equal part; moments are 0 before the first gradient."""
        for kind, tensor in self._get_tensors(parameter).items():
            if isinstance(tensor, DTensor):
                yield kind, _get_local_range(tensor)
                continue
            start, stop = (tensor.numel() * rank // self._world_size for rank in (self._rank, self._rank + 1))
            yield kind, TensorRange(start, tensor.reshape(-1)[start:stop])

    def restore(self, parameter: torch.nn.Parameter, read: ReadRange, *, step: int) -> None:
        """Set weight, moments and step count of a parameter; reads this rank's shard, or with DDP everything."""
        self._create_state(parameter, step)
        for kind, tensor in self._get_tensors(parameter).items():
            local = _get_local_range(tensor)
            local.values.copy_(read(kind, local.start, local.start + local.values.numel()))

    def _get_tensors(self, parameter: torch.nn.Parameter) -> Tensors:
        """Return weight and moments by kind."""
        weight = parameter.detach()
        state = self._optimizer.state.get(parameter)
        return {WEIGHT: weight, **{kind: state[kind] if state else torch.zeros_like(weight) for kind in MOMENTS}}

    def _create_state(self, parameter: torch.nn.Parameter, step: int) -> None:
        """Create the state of a parameter after `step` steps, with moments of 0."""
        weight = parameter.detach()
        self._optimizer.state[parameter] = {
            "step": torch.tensor(float(step), device=_get_local_range(weight).values.device),
            **{kind: torch.zeros_like(weight) for kind in MOMENTS},
        }


class EightBitStateAccess(TensorStateAccess):
    """Implements ModelStateAccess for the 8-bit AdamW of bitsandbytes, whose moments are saved as they are."""

    def __init__(self, optimizer: Any, *, rank: int, world_size: int) -> None:
        super().__init__(optimizer, rank=rank, world_size=world_size)
        self._eight_bit_optimizer = cast("Any", self._optimizer)
        self._eight_bit_optimizer.check_overrides()  # otherwise done by the first step: which moments have 32 bits
        self._positions = {
            parameter: (group_index, index)
            for group_index, group in enumerate(self._optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
        }

    def _get_tensors(self, parameter: torch.nn.Parameter) -> Tensors:
        if not self._optimizer.state.get(parameter):
            self._create_state(parameter, 0)
        state = self._optimizer.state[parameter]
        names = (*_EIGHT_BIT_MOMENTS, *(name for name in _SCALES if name in state))
        return {WEIGHT: parameter.detach(), **{name: state[name] for name in names}}

    def _create_state(self, parameter: torch.nn.Parameter, step: int) -> None:
        group_index, index = self._positions[parameter]
        group = self._optimizer.param_groups[group_index]
        self._eight_bit_optimizer.init_state(group, parameter, group_index, index)
        self._optimizer.state[parameter]["step"] = step


def iterate_trained_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the names and parameters that require gradients."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def iterate_saved_ranges(model: torch.nn.Module, access: ModelStateAccess) -> Iterator[tuple[str, TensorRange]]:
    """Yield the ranges of weights and moments that this rank saves, by the key of the tensor; no range is empty."""
    for name, parameter in iterate_trained_parameters(model):
        for kind, saved_range in access.iterate_saved_ranges(parameter):
            if saved_range.values.numel():
                yield build_key(kind, name), saved_range


def restore_state(model: torch.nn.Module, access: ModelStateAccess, read: ReadRange, *, step: int) -> None:
    """Restore all trained parameters and moments. read: reads by key. step: completed optimizer steps."""
    for name, parameter in iterate_trained_parameters(model):

        def read_kind(kind: str, start: int, stop: int, name: str = name) -> torch.Tensor:
            return read(build_key(kind, name), start, stop)

        access.restore(parameter, read_kind, step=step)


def build_key(kind: str, name: str) -> str:
    """Return the key of a tensor in a checkpoint. kind: such as WEIGHT. name: of the parameter."""
    return f"{kind}.{name}"


def gather_weights(
    model: torch.nn.Module, access: ModelStateAccess, *, keep_result: bool, dtype: torch.dtype | None = None
) -> Tensors:
    """Gather the weights to publish in host memory: of the adapter, or of a model without adapters (collective).

    dtype: of the returned tensors; None keeps that of training. A rank without `keep_result` returns an empty dict.
    """
    parameters = iterate_trained_parameters(model) if hasattr(model, "peft_config") else model.named_parameters()
    full_weights = ((name, access.gather_weight(parameter)) for name, parameter in parameters)
    return {name: weight.to("cpu", dtype or weight.dtype) for name, weight in full_weights if keep_result}


def list_saved_buffers(model: torch.nn.Module) -> Tensors:
    """Return the buffers that belong to the files of a model, such as the biases of routers; they are never sharded."""
    return {
        f"{module_name}.{name}".lstrip("."): module.get_buffer(name)
        for module_name, module, name in find_saved_buffers(model)
    }


def find_saved_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str]]:
    """Yield the module name, the module and the buffer name of the buffers that belong to the files of a model."""
    for module_name, module in model.named_modules():
        for name, _ in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield module_name, module, name


def _get_local_range(tensor: torch.Tensor) -> TensorRange:
    """Return a view of the elements that this rank holds. Raises RuntimeError if they are not contiguous."""
    if not isinstance(tensor, DTensor):
        return TensorRange(0, tensor.view(-1))
    local = tensor.to_local()
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    start = sum(offset * stride for offset, stride in zip(offsets, tensor.stride(), strict=True))
    assert local.shape[1:] == tensor.shape[1:], "FSDP2 shards the first dimension"
    return TensorRange(start, local.view(-1))
