"""What is learned, parameter by parameter and whole, however it is spread over the ranks.

A checkpoint written from it can be read by any number of ranks under any preset. Getting and setting are collective:
every rank calls them for the same parameters in the same order.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor, distribute_tensor

from finetune_trainer.errors import CheckpointCorrupt

UNREADABLE = (OSError, ValueError, RuntimeError, KeyError, SafetensorError)  # what damaged files make the readers raise
MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW
_WEIGHT = "weight"
_FILES = "training-state"
_SHARD = "5GB"  # and so much host memory is needed to write

Tensors = dict[str, torch.Tensor]


class Spread(Protocol):
    """How one way of spreading gives and takes whole tensors."""

    def weight(self, parameter: torch.nn.Parameter) -> torch.Tensor: ...

    def moment(self, parameter: torch.nn.Parameter, name: str) -> torch.Tensor: ...

    def set(self, parameter: torch.nn.Parameter, values: Mapping[str, torch.Tensor], *, step: int) -> None: ...


class Replicated:
    """DDP, where each rank has all; and FSDP2, whose tensors know how they are spread."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)

    def weight(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        return _whole(parameter.detach())

    def moment(self, parameter: torch.nn.Parameter, name: str) -> torch.Tensor:
        return _whole(self._optimizer.state[parameter][name])

    def set(self, parameter: torch.nn.Parameter, values: Mapping[str, torch.Tensor], *, step: int) -> None:
        with torch.no_grad():
            parameter.copy_(_spread_like(parameter, values[_WEIGHT]))
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        self._optimizer.state[parameter] = {
            "step": torch.tensor(float(step), device=local.device),
            **{name: _spread_like(parameter, values[name]) for name in MOMENTS},
        }


def named_trained(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def gather_state(model: torch.nn.Module, spread: Spread, *, keep: bool) -> Tensors:
    """Weights and moments of what is trained; empty on ranks that do not `keep` them."""
    gathered: Tensors = {}
    for name, parameter in named_trained(model):
        found = {_WEIGHT: spread.weight(parameter)}
        found |= {moment: spread.moment(parameter, moment) for moment in MOMENTS}
        if keep:
            gathered |= {f"{kind}.{name}": tensor for kind, tensor in found.items()}
    return gathered


def weights_in(state: Tensors) -> Tensors:
    """By the names that the model gives them."""
    return {key.removeprefix(f"{_WEIGHT}."): tensor for key, tensor in state.items() if key.startswith(f"{_WEIGHT}.")}


def write_state(state: Tensors, folder: Path) -> None:
    save_torch_state_dict(state, folder, filename_pattern=_FILES + "{suffix}.safetensors", max_shard_size=_SHARD)


def restore_state(model: torch.nn.Module, spread: Spread, folder: Path, *, step: int) -> None:
    """Every rank reads what it needs. Raises one of UNREADABLE for files that do not fit."""
    where = _open(folder)
    for name, parameter in named_trained(model):
        keys = {kind: f"{kind}.{name}" for kind in (_WEIGHT, *MOMENTS)}
        spread.set(parameter, {kind: where[key].get_tensor(key) for kind, key in keys.items()}, step=step)


def read_weights(folder: Path) -> Tensors:
    """Those of a checkpoint, whole and by the names that the model gives them. Raises CheckpointCorrupt."""
    try:
        return weights_in({key: file.get_tensor(key) for key, file in _open(folder).items() if key.startswith(_WEIGHT)})
    except UNREADABLE as error:
        raise CheckpointCorrupt(f"{folder} cannot be loaded ({error}); delete it to publish the next best") from error


def _open(folder: Path) -> dict[str, Any]:
    """By key, the open file that holds its tensor."""
    where: dict[str, Any] = {}
    for path in sorted(folder.glob(f"{_FILES}*.safetensors")):
        opened: Any = safe_open(path, framework="pt")
        where |= dict.fromkeys(opened.keys(), opened)
    return where


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gathered into host memory where it is spread; where it is not, no copy is made."""
    return tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else tensor


def _spread_like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if isinstance(parameter, DTensor):
        return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
    return value.to(parameter.device)
