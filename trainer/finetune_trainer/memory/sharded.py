"""Compute the memory of one rank whose model is sharded by DeepSpeed or FSDP2.

The formulas match DeepSpeed 0.19 and torch 2.13.
tests/integration/test_sharded_memory.py compares them with the tensors that both libraries allocate.
"""

from dataclasses import dataclass
from typing import Any

import torch

from finetune_api.v1alpha1.job import TrainerSpec
from finetune_trainer.memory.breakdown import (
    ADAPTERS,
    REFERENCE,
    WEIGHTS,
    MemoryPart,
    ModelStateFootprint,
    ShardingStrategy,
    rename_offloaded_parts,
)
from finetune_trainer.memory.model_shape import ADAMW_STATES, ModelShape
from finetune_trainer.parallel.deepspeed_config import build_deepspeed_config, is_offloaded, uses_float32_gradients

_FLOAT32_BYTES = 4
# Defaults of DeepSpeed's runtime/zero/config.py, in elements.
_BUCKET_SIZE, _MAX_LIVE_PARAMETERS, _SUB_GROUP_SIZE = 500_000_000, 1_000_000_000, 1_000_000_000
_ALL_REDUCE_SIZE = 500_000_000  # elements that stage 1 reduces together, in DeepSpeed's runtime/engine.py
# Fragmentation of ZeRO-3 as a multiple of the gathered bytes, fitted to the published measurements in
# docs/user-guide/memory.md: ZeRO-3 gathers blocks of many sizes on a separate CUDA stream, and the allocator cannot
# reuse the freed blocks on other streams (decisions/702).
_FRAGMENTATION_FACTOR = 2.5


def build_sharding_strategy(spec: TrainerSpec, dtype: torch.dtype, *, hidden_size: int) -> ShardingStrategy | None:
    """Build the sharding strategy of the spec; return None for DDP. dtype: dtype of forward and backward passes."""
    if spec.fsdp is not None:
        keeps_weights_gathered = not spec.fsdp.reshard_after_forward
        return Fsdp2Strategy(
            dtype.itemsize, keeps_weights_gathered=keeps_weights_gathered, cpu_offload=spec.fsdp.cpu_offload
        )
    if spec.deepspeed is None:
        return None
    return _build_zero_strategy(build_deepspeed_config(spec.deepspeed), dtype.itemsize, hidden_size)


def _build_zero_strategy(config: dict[str, Any], itemsize: int, hidden_size: int) -> "ZeroStrategy":
    """Build the strategy of a DeepSpeed config; like transformers, resolve `auto` from the hidden size."""
    section = config["zero_optimization"]
    stage = section["stage"]
    bucket = section.get("reduce_bucket_size", _BUCKET_SIZE)
    limits = ("stage3_max_live_parameters", "max_live_parameters")
    return ZeroStrategy(
        stage=stage,
        itemsize=itemsize,
        bucket_size=hidden_size**2 if bucket == "auto" else int(bucket),
        buckets=2 if stage < 3 and section.get("overlap_comm") else 1,
        max_live_parameters=int(min(section.get(name, _MAX_LIVE_PARAMETERS) for name in limits)),
        sub_group_size=int(section.get("sub_group_size", _SUB_GROUP_SIZE)),
        has_float32_gradients=itemsize < _FLOAT32_BYTES and uses_float32_gradients(config),
        offload_optimizer=is_offloaded(config, "offload_optimizer"),
        offload_param=is_offloaded(config, "offload_param"),
    )


@dataclass(frozen=True)
class ZeroStrategy:
    """A stage of DeepSpeed's ZeRO (arXiv 1910.02054): each rank updates a float32 shard of the trained parameters.

    Fields are named after DeepSpeed's options; sizes are in elements.
    """

    stage: int
    itemsize: int  # bytes per element in forward and backward
    bucket_size: int  # elements per collective
    buckets: int
    max_live_parameters: int  # maximum number of parameters that stage 3 keeps gathered
    sub_group_size: int  # elements that stage 3 updates together
    has_float32_gradients: bool = False  # 16-bit gradients are reduced and accumulated in float32
    offload_optimizer: bool = False
    offload_param: bool = False

    def compute_footprint(self, shape: ModelShape, world_size: int) -> ModelStateFootprint:
        """Return the memory of the model states on one rank."""
        shard = _compute_shard_size(shape.trained_parameters, world_size)
        gathered = self.itemsize * min(shape.parameters, self.max_live_parameters) if self.stage == 3 else 0
        weights = _build_weight_parts(
            shape, self.itemsize * shape.trained_parameters, world_size if self.stage == 3 else 1
        )
        states = (
            MemoryPart("weights in float32", _FLOAT32_BYTES * shard),
            MemoryPart("optimizer states", ADAMW_STATES * _FLOAT32_BYTES * shard),
        )
        gradients = MemoryPart("gradients", self._count_held_gradient_bytes(shape, shard))
        offloaded = (*states, MemoryPart("gradients", self._count_offloaded_gradient_bytes(shard)))
        return ModelStateFootprint(
            resident_parts=(
                *(() if self.offload_param else weights),
                *(() if self.offload_optimizer else (gradients, *states)),
            ),
            offloaded_parts=rename_offloaded_parts(
                *(weights if self.offload_param else ()), *(offloaded if self.offload_optimizer else ())
            ),
            forward_backward_parts=(
                MemoryPart("gathered weights", gathered),
                MemoryPart("gradients in transit", self._count_transient_gradient_bytes(shape, shard)),
                MemoryPart("gradient buckets", self._count_bucket_bytes()),
            ),
            optimizer_step_parts=() if self.offload_optimizer else (self._build_optimizer_step_part(shape, shard),),
            fragmented_bytes=int(_FRAGMENTATION_FACTOR * gathered),
            rank_zero_loading_bytes=self._count_loading_bytes(shape),
            saved_bytes=_count_saved_bytes(shape, world_size),
        )

    def _count_loading_bytes(self, shape: ModelShape) -> int:
        """Return the size of the files that rank 0 reads for stage 3, one model after the other."""
        model_bytes = shape.frozen_bytes + shape.trained_bytes
        return max(model_bytes, shape.reference_bytes) if self.stage == 3 else 0

    def _count_held_gradient_bytes(self, shape: ModelShape, shard_size: int) -> int:
        """Return the size of the gradient buffers that are kept between steps, which stage 2 does not have."""
        if self.stage == 3:
            return (_FLOAT32_BYTES if self.has_float32_gradients else self.itemsize) * shard_size
        return _FLOAT32_BYTES * shape.trained_parameters if self.stage == 1 and self.has_float32_gradients else 0

    def _count_offloaded_gradient_bytes(self, shard_size: int) -> int:
        """Return the size of the gradients in host memory: those of the update in float32, and further copies."""
        if self.stage == 3:
            copies = _FLOAT32_BYTES if self.has_float32_gradients else self.itemsize
        else:
            copies = self.itemsize if self.has_float32_gradients else 2 * self.itemsize
        return (_FLOAT32_BYTES + copies) * shard_size

    def _count_bucket_bytes(self) -> int:
        """Return the size of the buckets, and of the float32 copy of the bucket that is being reduced."""
        copy_bytes = _FLOAT32_BYTES if self.has_float32_gradients else 0
        return (self.itemsize * self.buckets + copy_bytes) * self.bucket_size

    def _count_transient_gradient_bytes(self, shape: ModelShape, shard_size: int) -> int:
        """Return the size of the gradients outside the buckets in the backward pass.

        Stage 1 keeps all gradients until the optimizer step. Later stages keep the gradients of the bucket that is
        being filled, and stage 2 also its shard of the reduced gradients: on the GPU, or in host memory if the
        optimizer is offloaded and they have 16 bits.
        """
        if self.stage == 1:
            return self.itemsize * shape.trained_parameters
        pending_elements = min(shape.trained_parameters, max(self.bucket_size, shape.largest_parameter))
        shard_bytes = 0
        if self.stage == 2 and self.has_float32_gradients:
            shard_bytes = _FLOAT32_BYTES * shard_size
        elif self.stage == 2 and not self.offload_optimizer:
            shard_bytes = self.itemsize * shard_size
        return self.itemsize * pending_elements + shard_bytes

    def _build_optimizer_step_part(self, shape: ModelShape, shard_size: int) -> MemoryPart:
        """Return the memory for gradients that only the optimizer step needs.

        16-bit gradients are converted to float32; stages 1 and 2 also flatten them, stage 3 stores them flat. Stage 1
        flattens and reduces float32 gradients in the step, and keeps the 16-bit gradients until its end.
        """
        updated_elements = min(shard_size, self.sub_group_size) if self.stage == 3 else shard_size
        if self.has_float32_gradients and self.stage == 1:
            flattened_elements = min(shape.trained_parameters, _ALL_REDUCE_SIZE)
            size = self.itemsize * shape.trained_parameters + _FLOAT32_BYTES * flattened_elements
        elif self.has_float32_gradients:
            size = _FLOAT32_BYTES * updated_elements
        else:
            size = (_FLOAT32_BYTES + self.itemsize * (1 if self.stage == 3 else 2)) * updated_elements
        return MemoryPart("gradients for the update", size)


@dataclass(frozen=True)
class Fsdp2Strategy:
    """FSDP2, which gathers one layer while prefetching the next; parameters outside the layers stay gathered."""

    itemsize: int  # bytes per element in forward and backward
    keeps_weights_gathered: bool  # True: reshard_after_forward is off
    cpu_offload: bool

    def compute_footprint(self, shape: ModelShape, world_size: int) -> ModelStateFootprint:
        """Return the memory of the model states on one rank.

        Trained parameters and their gradients are float32. Two layers have a flat all-gather buffer, and one of them
        also its unflattened weights. Gradients exist unflattened and then in a flat float32 reduce-scatter buffer.
        """
        layer, outer = shape.layer_parameters, shape.outer_parameters
        shard_bytes = _FLOAT32_BYTES * _compute_shard_size(shape.trained_parameters, world_size)
        states = (
            *_build_weight_parts(shape, _FLOAT32_BYTES * shape.trained_parameters, world_size),
            MemoryPart("gradients", shard_bytes),
            MemoryPart("optimizer states", ADAMW_STATES * shard_bytes),
        )
        gathered = shape.parameters + layer if self.keeps_weights_gathered else outer + 3 * layer
        trained_ratio = shape.trained_parameters / shape.parameters
        gradient_bytes = self.itemsize * (outer + layer) + _FLOAT32_BYTES * layer
        return ModelStateFootprint(
            resident_parts=() if self.cpu_offload else states,
            offloaded_parts=rename_offloaded_parts(*states) if self.cpu_offload else (),
            forward_backward_parts=(
                MemoryPart("gathered weights", self.itemsize * gathered),
                MemoryPart("gradients in transit", int(trained_ratio * gradient_bytes)),
            ),
            rank_zero_loading_bytes=shape.frozen_bytes + shape.loaded_bytes + shape.reference_bytes,
            saved_bytes=_count_saved_bytes(shape, world_size),
        )


def _count_saved_bytes(shape: ModelShape, world_size: int) -> int:
    """Return the size of the float32 weights and moments that one rank writes to a checkpoint."""
    return (1 + ADAMW_STATES) * _FLOAT32_BYTES * _compute_shard_size(shape.trained_parameters, world_size)


def _build_weight_parts(shape: ModelShape, trained_bytes: int, shards: int) -> tuple[MemoryPart, ...]:
    """Return the memory parts of weights that are divided into `shards` shards. Buffers are never sharded."""
    adapters = trained_bytes if shape.has_adapters else 0
    frozen_and_trained = shape.frozen_bytes + trained_bytes - adapters
    return (
        MemoryPart(WEIGHTS, _compute_shard_size(frozen_and_trained, shards) + shape.buffer_bytes),
        MemoryPart(REFERENCE, _compute_shard_size(shape.resident_reference_bytes, shards)),
        MemoryPart(ADAPTERS, _compute_shard_size(adapters, shards)),
    )


def _compute_shard_size(total_size: int, shards: int) -> int:
    return -(-total_size // shards)
