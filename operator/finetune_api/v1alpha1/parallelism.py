"""spec.deepspeed and spec.fsdp: how weights, gradients and optimizer states are sharded over the ranks."""

from typing import Literal, Self

from pydantic import ConfigDict, Field, model_validator

from finetune_api.v1alpha1.base import Model, validations
from finetune_api.v1alpha1.pod_types import RawObject

QUANTIZED_CANNOT_SHARD = (
    "lora.quantization: 4-bit weights cannot be sharded over ranks; remove fsdp, or use a deepspeed preset up to"
    " zero2_offload, which shards only gradients and optimizer states"
)
PROBE_EXCLUDES_DEEPSPEED = (
    "training.probe: gradients inside DeepSpeed cannot be reset after a probe; remove probe or deepspeed"
)


class Deepspeed(Model):
    """ZeRO (arXiv 1910.02054): DeepSpeed shards optimizer states, gradients and weights over the ranks."""

    preset: Literal["zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"] | None = Field(
        default=None,
        description="What is sharded: optimizer states (zero1), also gradients (zero2), also weights (zero3); _offload "
        "keeps optimizer states, and with zero3 also weights, in host memory.",
    )
    config: RawObject | None = Field(
        default=None,
        description="A DeepSpeed config instead of a preset; batch, optimizer and precision are those of the job.",
    )

    model_config = ConfigDict(
        json_schema_extra=validations(
            ("has(self.preset) != has(self.config)", "set either preset or config"),
        )
    )

    @property
    def shards_weights(self) -> bool:
        """Whether weights are sharded (ZeRO-3), by preset or by config."""
        if self.preset is not None:
            return self.preset.startswith("zero3")
        section = (self.config or {}).get("zero_optimization")
        return isinstance(section, dict) and section.get("stage") == 3

    @model_validator(mode="after")
    def _preset_or_config(self) -> Self:
        if (self.preset is None) == (self.config is None):
            raise ValueError("set either preset or config")
        return self


class Fsdp(Model):
    """PyTorch's fully sharded data parallelism (FSDP2): weights, gradients and optimizer states are sharded."""

    reshard_after_forward: bool = Field(
        default=True,
        description="Free gathered weights between forward and backward pass; false is faster but uses more memory.",
    )
    cpu_offload: bool = Field(
        default=False, description="Keep sharded weights, gradients and optimizer states in host memory."
    )
