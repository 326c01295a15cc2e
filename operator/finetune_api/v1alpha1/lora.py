"""Defines spec.lora: low-rank adapters, with the field names of peft."""

from typing import ClassVar, Literal

from pydantic import Field

from finetune_api.v1alpha1.base import CelRule, CrossFieldRule, ModelWithRules, NonEmpty
from finetune_supervisor.contract import to_camel

_SHAPE_FIELDS = ("r", "lora_alpha", "target_modules", "use_rslora", "use_dora")


def _find_fields_excluded_by_adapter(lora: "Lora") -> str | None:
    shape_fields = [to_camel(name) for name in _SHAPE_FIELDS if name in lora.model_fields_set]
    if lora.adapter is None or not shape_fields:
        return None
    return f"adapter brings its own rank and modules; remove {', '.join(shape_fields)}"


class Lora(ModelWithRules):
    """Low-rank adapters (arXiv 2106.09685), which are trained instead of all weights."""

    r: int = Field(default=8, ge=1, le=4096, description="Rank of the adapter matrices.")
    lora_alpha: int = Field(
        default=32, ge=1, le=65536, description="Scaling: the adapter output is multiplied by loraAlpha / r."
    )
    lora_dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout probability of the adapter input.")
    target_modules: tuple[NonEmpty, ...] = Field(
        default=("all-linear",),
        min_length=1,
        max_length=64,
        description="Name suffixes of the modules that get an adapter, or all-linear.",
    )
    use_rslora: bool = Field(
        default=False, description="Scale by loraAlpha / sqrt(r) instead (rsLoRA, arXiv 2312.03732)."
    )
    use_dora: bool = Field(
        default=False, description="Train magnitude and direction separately (DoRA, arXiv 2402.09353)."
    )
    adapter: NonEmpty | None = Field(
        default=None,
        description="Adapter to continue training: a path on a mounted volume or a Hub id. Its rank and modules apply.",
    )
    quantization: Literal["nf4"] | None = Field(
        default=None,
        description="Quantize the frozen language model to 4-bit NormalFloat (QLoRA, arXiv 2305.14314): a quarter of"
        " the memory for weights, but slower. Not with fsdp or zero3, which shard weights.",
    )
    merge: bool = Field(default=False, description="Also write the model with merged adapter weights to result/merged.")

    rules: ClassVar[tuple[CrossFieldRule["Lora"], ...]] = (
        CrossFieldRule(
            "adapter defines its shape",
            _find_fields_excluded_by_adapter,
            (
                CelRule(
                    f"!has(self.adapter) || !({' || '.join(f'has(self.{to_camel(name)})' for name in _SHAPE_FIELDS)})",
                    f"adapter brings its own rank and modules; remove {', '.join(map(to_camel, _SHAPE_FIELDS))}",
                ),
            ),
        ),
    )
