"""Initialize DeepSpeed, and read and write the state of its ZeRO engine.

The engine keeps float32 master weights of 16-bit parameters.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from deepspeed import ops
from deepspeed.comm import init_distributed
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)

from finetune_trainer.parallel.model_state import KINDS, MOMENTS, WEIGHT, ReadRange, TensorRange

# Names of the tensors of a fragment in stages 1 and 2, by kind; None selects the float32 weight.
_FRAGMENT_NAMES: dict[str, str | None] = {WEIGHT: None, **{moment: moment for moment in MOMENTS}}
# Attributes with the float32 weights of this rank: of stages 1 and 2, of stage 1 in bfloat16, and of stage 3.
_FLAT_FLOAT32_PARTITIONS = (
    "single_partition_of_fp32_groups",
    "fp32_groups_flat_partition",
    "fp32_partitioned_groups_flat",
)


def init_deepspeed(backend: str) -> None:
    """Initialize DeepSpeed with torch's process group. backend: that of the device, such as nccl.

    Call it before a model is loaded, because ZeRO-3 shards the model while loading.
    """
    # DeepSpeed reads its table of ops only to decide whether to compile its own all-reduce for CPUs, which takes a
    # minute. Assigned before the first access, an empty table avoids the probes of all ops, which print warnings.
    ops.__compatible_ops__ = {}
    init_distributed(backend, auto_mpi_discovery=False, verbose=False)
    _forget_releases_of_invalid_traces()


def _forget_releases_of_invalid_traces() -> None:
    """Clear DeepSpeed's cache of the weights to release after a module whenever ZeRO-3 records a new trace.

    DeepSpeed 0.19 keeps the cache, although its values depend on the trace. If the first pass has no backward pass,
    ZeRO-3 would release all weights in every forward pass, and gather them again in every backward pass.
    """
    coordinator: Any = PartitionedParameterCoordinator
    # a decorator of DeepSpeed hides the function with the cache
    closure = coordinator._PartitionedParameterCoordinator__params_to_release.__closure__
    (cached_function,) = (cell.cell_contents for cell in closure if hasattr(cell.cell_contents, "cache_clear"))
    invalidate = coordinator._invalidate_trace

    def invalidate_and_forget(self: Any) -> None:
        invalidate(self)
        cached_function.cache_clear()

    coordinator._invalidate_trace = invalidate_and_forget


class ZeroStateAccess:
    """Implements ModelStateAccess for ZeRO stages 1 to 3."""

    def __init__(self, engine: Any) -> None:
        self._optimizer = engine.optimizer
        self._has_states = self._is_linked = False

    def gather_weight(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return the full weight on CPU, in float32 if it is trained (collective)."""
        full_weight: torch.Tensor | None = safe_get_full_fp32_param(parameter)
        if full_weight is not None:
            return full_weight.cpu()
        with GatheredParameters([parameter]):  # no-op unless stage 3
            return parameter.detach().cpu().clone()

    def iterate_saved_ranges(self, parameter: torch.nn.Parameter) -> Iterator[tuple[str, TensorRange]]:
        """Yield the parts of the float32 weight and moments that this rank updates."""
        self._link_optimizer_states()
        if hasattr(parameter, "ds_id"):  # stage 3
            start, stop = _get_partition_bounds(parameter)
            yield WEIGHT, TensorRange(start, safe_get_local_fp32_param(parameter).flatten()[: stop - start])
            for moment in MOMENTS:
                local = safe_get_local_optimizer_state(parameter, moment)
                yield moment, TensorRange(start, local.flatten()[: stop - start])
            return
        fragment = cast("Any", parameter)._hp_mapping
        if fragment is not None:  # None: other ranks update all of this parameter
            for kind, name in _FRAGMENT_NAMES.items():
                yield kind, TensorRange(fragment.lp_fragment_address.start, fragment.get_hp_fragment(name))

    def restore(self, parameter: torch.nn.Parameter, read: ReadRange, *, step: int) -> None:
        """Set weight, moments and step count of a parameter.

        Reads the part that this rank updates, and with stages 1 and 2 also all 16-bit weights, which every rank holds.
        """
        self._create_optimizer_states(step)
        if hasattr(parameter, "ds_id"):
            self._restore_partitioned(parameter, read)
            return
        with torch.no_grad():
            parameter.copy_(read(WEIGHT, 0, parameter.numel()).view_as(parameter))
        fragment = cast("Any", parameter)._hp_mapping
        if fragment is None:
            return
        address = fragment.lp_fragment_address
        for kind, name in _FRAGMENT_NAMES.items():
            fragment.get_hp_fragment(name).data.copy_(read(kind, address.start, address.start + address.numel))

    def _restore_partitioned(self, parameter: Any, read: ReadRange) -> None:
        """Set a partitioned parameter of stage 3."""
        start, stop = _get_partition_bounds(parameter)
        padding = (0, parameter.ds_tensor.ds_numel - (stop - start))
        local = {kind: torch.nn.functional.pad(read(kind, start, stop), padding) for kind in KINDS}
        parameter.ds_tensor.copy_(local[WEIGHT])
        # Parameters smaller than stage3_param_persistence_threshold are never partitioned.
        if parameter.numel() == parameter.ds_numel:
            parameter.data.copy_(read(WEIGHT, 0, parameter.ds_numel).view_as(parameter))
        safe_set_local_fp32_param(parameter, local[WEIGHT].float())
        for name in MOMENTS:
            safe_set_local_optimizer_state(parameter, local[name], name)

    def _create_optimizer_states(self, step: int) -> None:
        """Create the optimizer states that DeepSpeed's setters need before DeepSpeed creates them in its first step."""
        if self._has_states:
            return
        torch_optimizer = self._optimizer.optimizer
        name = next(name for name in _FLAT_FLOAT32_PARTITIONS if hasattr(self._optimizer, name))
        for tensor in getattr(self._optimizer, name):
            count = (
                torch.tensor(float(step), device=tensor.device)
                if isinstance(torch_optimizer, torch.optim.AdamW)
                else step
            )
            moments = {moment: torch.zeros_like(tensor) for moment in MOMENTS}
            torch_optimizer.state[tensor] = {"step": count, **moments}
        self._link_optimizer_states()
        self._has_states = True

    def _link_optimizer_states(self) -> None:
        """Link parameters to their optimizer states again.

        Stages 1 and 2 link them once, after the step of the first parameter group, when other groups have none yet.
        """
        if not self._is_linked and hasattr(self._optimizer, "_lazy_init_hp_params_optimizer_state"):
            self._optimizer._hp_optimizer_states_linked = False
            self._optimizer._lazy_init_hp_params_optimizer_state()
        self._is_linked = True


def _get_partition_bounds(parameter: Any) -> tuple[int, int]:
    """Return the range of the flattened parameter of stage 3 that this rank holds; the last ones may be empty."""
    size, last = parameter.ds_tensor.ds_numel, parameter.ds_numel
    start = min(size * torch.distributed.get_rank(), last)
    return start, min(start + size, last)
