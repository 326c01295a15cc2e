"""How memory is spread over the ranks, as the spec says it."""

from typing import Literal, Self

from pydantic import ConfigDict, Field, model_validator

from finetune_api.v1alpha1.base import Model, validations
from finetune_api.v1alpha1.pod_types import RawObject

QUANTIZED_IS_WHOLE = (
    "lora.quantization: 4-bit weights cannot be spread over ranks; leave fsdp out, or take a deepspeed preset up to"
    " zero2_offload, which spreads what the adapters need"
)
NO_PROBE = "training.probe: DeepSpeed keeps gradients where they cannot be undone; leave probe out, or deepspeed"


class Deepspeed(Model):
    """ZeRO (arXiv 1910.02054): optimizer states, gradients and weights are spread over the ranks by DeepSpeed."""

    preset: Literal["zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"] | None = Field(
        default=None,
        description="What is spread: optimizer states (zero1), gradients too (zero2), weights too (zero3); _offload "
        "keeps optimizer states, and with zero3 weights, in host memory.",
    )
    config: RawObject | None = Field(
        default=None, description="A config of DeepSpeed's own instead; batch, optimizer and precision stay the job's."
    )

    model_config = ConfigDict(
        json_schema_extra=validations(
            ("has(self.preset) != has(self.config)", "set either preset or config"),
        )
    )

    @property
    def spreads_weights(self) -> bool:
        """ZeRO-3, by preset or by config."""
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
    """PyTorch's fully sharded data parallelism (FSDP2): weights, gradients and optimizer states are spread."""

    reshard_after_forward: bool = Field(
        default=True, description="Free gathered weights between forward and backward; false trades memory for speed."
    )
    cpu_offload: bool = Field(default=False, description="Keep what is spread in host memory.")
