"""ZeRO's pieces put together and taken apart again; DeepSpeed keeps float32 copies of what is trained in 16 bits."""

from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.comm import init_distributed
from deepspeed.ops import __compatible_ops__ as compatible_ops
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)

from finetune_trainer.parallel.full_state import MOMENTS


def join_deepspeed() -> None:
    """In torch's process group. Before a model is built: stage 3 spreads it while it is read, over the ranks that
    DeepSpeed knows by then.
    """
    # on CPU it compiles an all-reduce of its own at first use, for a minute, and pods have no compiler
    compatible_ops["deepspeed_shm_comm"] = False
    init_distributed(torch.distributed.get_backend(), auto_mpi_discovery=False, verbose=False)


class Zero:
    """Stages 1 to 3 of one engine."""

    def __init__(self, engine: Any) -> None:
        self._optimizer = engine.optimizer
        self._ready = self._linked = False

    def weight(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        trained: torch.Tensor | None = safe_get_full_fp32_param(parameter)
        if trained is not None:
            return trained.cpu()
        with GatheredParameters([parameter]):  # of stage 3; else it is whole already
            return parameter.detach().cpu().clone()

    def moment(self, parameter: torch.nn.Parameter, name: str) -> torch.Tensor:
        self._link()
        found: torch.Tensor = safe_get_full_optimizer_state(parameter, name)
        return found.cpu()

    def set(self, parameter: torch.nn.Parameter, values: Mapping[str, torch.Tensor], *, step: int) -> None:
        self._begin(step)
        if hasattr(parameter, "ds_id"):
            self._set_partitioned(parameter, values)
            return
        with torch.no_grad():
            parameter.copy_(values["weight"])
        safe_set_full_fp32_param(parameter, values["weight"].float())
        for name in MOMENTS:
            safe_set_full_optimizer_state(parameter, values[name], name)

    def _set_partitioned(self, parameter: Any, values: Mapping[str, torch.Tensor]) -> None:
        """Of stage 3. DeepSpeed's own setter of whole tensors fails where ranks do not divide the size."""
        parameter.ds_tensor.copy_(_piece(parameter, values["weight"]))
        if parameter.numel() == parameter.ds_numel:  # small ones stay whole on every rank
            parameter.data.copy_(values["weight"])
        safe_set_local_fp32_param(parameter, _piece(parameter, values["weight"]).float())
        for name in MOMENTS:
            safe_set_local_optimizer_state(parameter, _piece(parameter, values[name]), name)

    def _begin(self, step: int) -> None:
        """DeepSpeed makes the states at the first step, but they must be there to be set."""
        if self._ready:
            return
        inner = self._optimizer.optimizer
        flat = (
            getattr(self._optimizer, "single_partition_of_fp32_groups", None)
            or self._optimizer.fp32_partitioned_groups_flat
        )
        for tensor in flat:
            count = torch.tensor(float(step), device=tensor.device) if isinstance(inner, torch.optim.AdamW) else step
            inner.state[tensor] = {"step": count, **{name: torch.zeros_like(tensor) for name in MOMENTS}}
        self._link()
        self._ready = True

    def _link(self) -> None:
        """Stages 1 and 2 link parameters with their states after the first group's step, too early for the others."""
        if not self._linked and hasattr(self._optimizer, "_lazy_init_hp_params_optimizer_state"):
            self._optimizer._hp_optimizer_states_linked = False
            self._optimizer._lazy_init_hp_params_optimizer_state()
        self._linked = True


def _piece(parameter: Any, value: torch.Tensor) -> torch.Tensor:
    """This rank's, with zeros behind the end."""
    size = parameter.ds_tensor.ds_numel
    start = size * torch.distributed.get_rank()
    flat = value.flatten()[start : start + size]
    return torch.nn.functional.pad(flat, (0, size - flat.numel())).to(parameter.ds_tensor.device)
