"""Defines spec.deepspeed and spec.fsdp, which shard weights, gradients and optimizer states over the ranks."""

from typing import ClassVar, Literal

from pydantic import Field

from finetune_api.v1alpha1.base import CelRule, CrossFieldRule, Model, ModelWithRules
from finetune_api.v1alpha1.pod_types import FreeFormObject


class Deepspeed(ModelWithRules):
    """ZeRO (arXiv 1910.02054): DeepSpeed shards optimizer states, gradients and weights over the ranks."""

    preset: Literal["zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"] | None = Field(
        default=None,
        description="What is sharded: optimizer states (zero1), also gradients (zero2), also weights (zero3); _offload "
        "keeps optimizer states, and with zero3 also weights, in host memory.",
    )
    config: FreeFormObject | None = Field(
        default=None,
        description="A DeepSpeed config instead of a preset; batch, optimizer and precision are those of the job.",
    )

    rules: ClassVar[tuple[CrossFieldRule["Deepspeed"], ...]] = (
        CrossFieldRule.from_cel_rule(
            "preset or config",
            lambda deepspeed: (deepspeed.preset is None) == (deepspeed.config is None),
            CelRule("has(self.preset) != has(self.config)", "set either preset or config"),
        ),
    )

    @property
    def shards_weights(self) -> bool:
        """Whether the preset or config shards weights (ZeRO-3)."""
        if self.preset is not None:
            return self.preset.startswith("zero3")
        section = (self.config or {}).get("zero_optimization")
        return isinstance(section, dict) and section.get("stage") == 3


class Fsdp(Model):
    """PyTorch's fully sharded data parallelism (FSDP2): weights, gradients and optimizer states are sharded."""

    reshard_after_forward: bool = Field(
        default=True,
        description="Free gathered weights between forward and backward pass; false is faster but uses more memory.",
    )
    cpu_offload: bool = Field(
        default=False, description="Keep sharded weights, gradients and optimizer states in host memory."
    )
