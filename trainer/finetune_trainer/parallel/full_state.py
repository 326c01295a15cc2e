"""Save and restore the full weights and optimizer states of trained parameters, independent of their sharding.

A checkpoint can be restored with any number of ranks and any preset. Access is collective: every rank must access
the same parameters in the same order (decisions/509).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor, distribute_tensor

from finetune_trainer.errors import CheckpointCorrupt

READ_ERRORS = (OSError, ValueError, RuntimeError, KeyError, SafetensorError)  # errors that damaged files may cause
MOMENTS = ("exp_avg", "exp_avg_sq")  # state names of torch's AdamW
_WEIGHT = "weight"
_FILES = "training-state"
_MAX_FILE_SIZE = "5GB"  # limits the host memory for writing a file, which equals the file size

Tensors = dict[str, torch.Tensor]


class FullStateAccess(Protocol):
    """Interface to full tensors of a sharded model, with an implementation for each kind of sharding."""

    def gather_weight(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return the full, unsharded weight."""

    def gather_moment(self, parameter: torch.nn.Parameter, name: str) -> torch.Tensor:
        """Return the full AdamW moment of this name, one of MOMENTS."""

    def set_state(self, parameter: torch.nn.Parameter, values: Mapping[str, torch.Tensor], *, step: int) -> None:
        """Set weight, moments and step count of a parameter from full tensors."""


class TensorStateAccess:
    """Implements FullStateAccess for DDP, with plain tensors, and for FSDP2, with DTensors."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)

    def gather_weight(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return the full, unsharded weight."""
        return _gather_full(parameter.detach())

    def gather_moment(self, parameter: torch.nn.Parameter, name: str) -> torch.Tensor:
        """Return the full AdamW moment; it is zero for a parameter that has had no gradient yet."""
        state = self._optimizer.state.get(parameter)
        return _gather_full(state[name] if state else torch.zeros_like(parameter.detach()))

    def set_state(self, parameter: torch.nn.Parameter, values: Mapping[str, torch.Tensor], *, step: int) -> None:
        """Set weight, moments and step count of a parameter from full tensors."""
        with torch.no_grad():
            parameter.copy_(_shard_like(parameter, values[_WEIGHT]))
        local_tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        self._optimizer.state[parameter] = {
            "step": torch.tensor(float(step), device=local_tensor.device),
            **{name: _shard_like(parameter, values[name]) for name in MOMENTS},
        }


def iterate_trained_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the names and parameters that require gradients."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def gather_state(model: torch.nn.Module, access: FullStateAccess, *, keep_result: bool) -> Tensors:
    """Gather weights and moments of the trained parameters; a rank without `keep_result` returns an empty dict."""
    gathered_tensors: Tensors = {}
    for name, parameter in iterate_trained_parameters(model):
        tensors = {_WEIGHT: access.gather_weight(parameter)}
        tensors |= {moment: access.gather_moment(parameter, moment) for moment in MOMENTS}
        if keep_result:
            gathered_tensors |= {f"{kind}.{name}": tensor for kind, tensor in tensors.items()}
    return gathered_tensors


def gather_weights(model: torch.nn.Module, access: FullStateAccess, *, keep_result: bool) -> Tensors:
    """Gather the weights to publish: the adapter weights, or all weights of a model without adapters.

    A rank without `keep_result` returns an empty dict.
    """
    parameters = iterate_trained_parameters(model) if hasattr(model, "peft_config") else model.named_parameters()
    full_weights = ((name, access.gather_weight(parameter)) for name, parameter in parameters)
    return {name: weight for name, weight in full_weights if keep_result}


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


def extract_weights(state: Tensors) -> Tensors:
    """Return the weights by parameter name, without the moments."""
    return {key.removeprefix(f"{_WEIGHT}."): tensor for key, tensor in state.items() if key.startswith(f"{_WEIGHT}.")}


def write_state(state: Tensors, folder: Path) -> None:
    """Write the gathered tensors as safetensors files."""
    pattern = _FILES + "{suffix}.safetensors"
    save_torch_state_dict(state, folder, filename_pattern=pattern, max_shard_size=_MAX_FILE_SIZE)


def restore_state(model: torch.nn.Module, access: FullStateAccess, folder: Path, *, step: int) -> None:
    """Restore all trained parameters and moments from a checkpoint; every rank reads the files.

    step: completed optimizer steps. Raises: one of READ_ERRORS if files are damaged or do not match the model.
    """
    files = _open_files(folder)
    for name, parameter in iterate_trained_parameters(model):
        keys = {kind: f"{kind}.{name}" for kind in (_WEIGHT, *MOMENTS)}
        access.set_state(parameter, {kind: files[key].get_tensor(key) for kind, key in keys.items()}, step=step)


def read_weights(folder: Path) -> Tensors:
    """Return the full weights of a checkpoint by parameter name. Raises CheckpointCorrupt."""
    try:
        return extract_weights(
            {key: file.get_tensor(key) for key, file in _open_files(folder).items() if key.startswith(_WEIGHT)}
        )
    except READ_ERRORS as error:
        raise CheckpointCorrupt(f"{folder} cannot be loaded ({error}); delete it to publish the next best") from error


def _open_files(folder: Path) -> dict[str, Any]:
    """Open all files, and map each tensor name to the file that contains it."""
    files: dict[str, Any] = {}
    for path in sorted(folder.glob(f"{_FILES}*.safetensors")):
        open_file: Any = safe_open(path, framework="pt")
        files |= dict.fromkeys(open_file.keys(), open_file)
    return files


def _gather_full(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a DTensor into host memory; return a plain tensor unchanged."""
    return tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else tensor


def _shard_like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Shard a full tensor like the parameter, on the parameter's device, which is the CPU if it is offloaded."""
    if isinstance(parameter, DTensor):
        # distribute_tensor moves the tensor to the device of the mesh
        return distribute_tensor(value, parameter.device_mesh, parameter.placements).to(parameter.device)
    return value.to(parameter.device)
