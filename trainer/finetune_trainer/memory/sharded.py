"""What a rank holds where a model is spread over the ranks, as DeepSpeed and FSDP2 allocate it.

The sums are those of DeepSpeed 0.19 and torch 2.13; tests/integration/test_sharded_memory.py books every tensor
of both.
"""

from dataclasses import dataclass
from typing import Any

import torch

from finetune_api.v1alpha1.job import TrainerSpec
from finetune_trainer.memory.breakdown import ADAMW_STATES, Footprint, Part, Spread
from finetune_trainer.memory.model_shape import ModelShape
from finetune_trainer.parallel.presets import deepspeed_config

_FLOAT = 4
# What DeepSpeed takes where a config does not say: its runtime/zero/config.py.
_BUCKET, _LIVE, _GROUP = 500_000_000, 1_000_000_000, 1_000_000_000
# Times what stage 3 gathers, fitted to the published rows of docs/user-guide/memory.md: it gathers on a stream of its
# own, in blocks of many sizes, and what is freed there no other stream can take.
_SCATTERED = 2.5


def spread_of(spec: TrainerSpec, dtype: torch.dtype, *, hidden_size: int) -> Spread | None:
    """The way that the job asks for, of a model that computes in that type; None: whole on every rank."""
    if spec.fsdp is not None:
        keeps = not spec.fsdp.reshard_after_forward
        return Sharded(dtype.itemsize, keeps_gathered=keeps, offloads=spec.fsdp.cpu_offload)
    if spec.deepspeed is None:
        return None
    return _zero(deepspeed_config(spec.deepspeed)["zero_optimization"], dtype.itemsize, hidden_size)


def _zero(section: dict[str, Any], itemsize: int, hidden_size: int) -> "Zero":
    """transformers fills in `auto` from the model's width."""
    stage = section["stage"]
    bucket = section.get("reduce_bucket_size", _BUCKET)
    live = min(section.get(name, _LIVE) for name in ("stage3_max_live_parameters", "max_live_parameters"))
    return Zero(
        stage=stage,
        itemsize=itemsize,
        bucket=hidden_size**2 if bucket == "auto" else int(bucket),
        buffers=2 if stage < 3 and section.get("overlap_comm") else 1,
        live=int(live),
        group=int(section.get("sub_group_size", _GROUP)),
        offloads_states=_offloads(section, "offload_optimizer"),
        offloads_weights=_offloads(section, "offload_param"),
    )


def _offloads(section: dict[str, Any], name: str) -> bool:
    return str((section.get(name) or {}).get("device", "none")) != "none"


@dataclass(frozen=True)
class Zero:
    """A stage of DeepSpeed's ZeRO (arXiv 1910.02054). What is trained has a copy in float32, on one rank each."""

    stage: int
    itemsize: int  # bytes of a number that is computed with
    bucket: int  # numbers that travel together
    buffers: int  # of that size
    live: int  # numbers that stage 3 keeps gathered at most
    group: int  # numbers that stage 3 updates at a time
    offloads_states: bool = False
    offloads_weights: bool = False

    def footprint(self, shape: ModelShape, ranks: int) -> Footprint:
        """Of one of so many ranks."""
        mine = _share(shape.trained_parameters, ranks)
        gathered = self.itemsize * min(shape.parameters, self.live) if self.stage == 3 else 0
        among = ranks if self.stage == 3 else 1
        weights = _weights(shape, self.itemsize * shape.trained_parameters, among)
        states = (
            Part("weights in float32", _FLOAT * mine),
            Part("optimizer states", ADAMW_STATES * _FLOAT * mine),
        )
        gradients = Part("gradients", self.itemsize * mine if self.stage == 3 else 0)  # in one buffer, for good
        copies = 1 if self.stage == 3 else 2  # of gradients in host memory, beside those in float32
        offloaded = (*states, Part("gradients", (_FLOAT + copies * self.itemsize) * mine))
        return Footprint(
            held=(
                *(() if self.offloads_weights else weights),
                *(() if self.offloads_states else (gradients, *states)),
            ),
            offloaded=_offloaded(
                *(weights if self.offloads_weights else ()), *(offloaded if self.offloads_states else ())
            ),
            computing=(
                Part("gathered weights", gathered),
                Part("gradients on their way", self.itemsize * self._on_their_way(shape, mine)),
                Part("gradient buckets", self.itemsize * self.buffers * self.bucket),
            ),
            updating=() if self.offloads_states else (self._for_the_update(mine),),
            scattered=int(_SCATTERED * gathered),
        )

    def _on_their_way(self, shape: ModelShape, mine: int) -> int:
        """Numbers: all in stage 1, which sends them before the update; else what does not fill a bucket yet."""
        waiting = min(shape.trained_parameters, max(self.bucket, shape.largest_parameter))
        if self.stage == 1:
            return shape.trained_parameters
        return waiting + (mine if self.stage == 2 and not self.offloads_states else 0)

    def _for_the_update(self, mine: int) -> Part:
        """Gradients are put together, then widened; stage 3 has their pieces from step to step."""
        if self.stage == 3:
            return Part("gradients for the update", (_FLOAT + self.itemsize) * min(mine, self.group))
        return Part("gradients for the update", (_FLOAT + 2 * self.itemsize) * mine)


@dataclass(frozen=True)
class Sharded:
    """FSDP2: a layer is gathered for its turn while the next one is on its way, what is outside layers for the step."""

    itemsize: int  # bytes of a number that is computed with
    keeps_gathered: bool
    offloads: bool

    def footprint(self, shape: ModelShape, ranks: int) -> Footprint:
        """Of one of so many ranks.

        What is trained is float32, and so are its gradients. Weights are gathered flat for two layers, and once more in
        the shapes of one; gradients are there in their shapes, then flat.
        """
        layer, outer = shape.layer_parameters, shape.outer_parameters
        mine = _FLOAT * _share(shape.trained_parameters, ranks)
        kept = (
            *_weights(shape, _FLOAT * shape.trained_parameters, ranks),
            Part("gradients", mine),
            Part("optimizer states", ADAMW_STATES * mine),
        )
        gathered = shape.parameters + layer if self.keeps_gathered else outer + 3 * layer
        learning = shape.trained_parameters / shape.parameters
        return Footprint(
            held=() if self.offloads else kept,
            offloaded=_offloaded(*kept) if self.offloads else (),
            computing=(
                Part("gathered weights", self.itemsize * gathered),
                Part("gradients on their way", int(self.itemsize * learning * (outer + 2 * layer))),
            ),
        )


def _weights(shape: ModelShape, trained: int, among: int) -> tuple[Part, ...]:
    """Buffers are never spread."""
    adapters = trained if shape.adapted else 0
    return (
        Part("weights", _share(shape.frozen_bytes + trained - adapters, among) + shape.buffer_bytes),
        Part("reference model", _share(shape.reference_bytes, among)),
        Part("adapters", _share(adapters, among)),
    )


def _offloaded(*parts: Part) -> tuple[Part, ...]:
    return tuple(Part(f"offloaded {part.name}", part.size) for part in parts)


def _share(whole: int, ranks: int) -> int:
    return -(-whole // ranks)
