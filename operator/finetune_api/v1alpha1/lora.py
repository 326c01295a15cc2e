"""Low-rank adapters, as the spec says them; field names are peft's."""

from typing import Literal, Self

from pydantic import ConfigDict, Field, model_validator

from finetune_api.v1alpha1.base import Model, NonEmpty, to_camel, validations

_SHAPE = ("r", "lora_alpha", "target_modules", "use_rslora", "use_dora")


class Lora(Model):
    """Low-rank adapters (arXiv 2106.09685) instead of training every weight."""

    r: int = Field(default=8, ge=1, le=4096, description="Rank of the update matrices.")
    lora_alpha: int = Field(
        default=32, ge=1, le=65536, description="Scaling: the update is multiplied by loraAlpha / r."
    )
    lora_dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout probability on the adapter's input.")
    target_modules: tuple[NonEmpty, ...] = Field(
        default=("all-linear",), min_length=1, max_length=64, description="Module name suffixes, or all-linear."
    )
    use_rslora: bool = Field(
        default=False, description="Scale by loraAlpha / sqrt(r) instead (rsLoRA, arXiv 2312.03732)."
    )
    use_dora: bool = Field(
        default=False, description="Learn magnitudes apart from directions (DoRA, arXiv 2402.09353)."
    )
    adapter: NonEmpty | None = Field(
        default=None,
        description="An adapter to go on from, a path on a mounted volume or a Hub id; its shape is its own.",
    )
    quantization: Literal["nf4"] | None = Field(
        default=None,
        description="Keep the language model under the adapters in 4-bit NormalFloat (QLoRA, arXiv 2305.14314): about a"
        " quarter of its memory, and slower. Not with fsdp or zero3, which spread weights.",
    )
    merge: bool = Field(default=False, description="Also write the model with the adapter merged in: result/merged.")

    model_config = ConfigDict(
        json_schema_extra=validations(
            (
                f"!has(self.adapter) || !({' || '.join(f'has(self.{to_camel(name)})' for name in _SHAPE)})",
                f"adapter has a shape of its own; leave {', '.join(map(to_camel, _SHAPE))} out",
            )
        )
    )

    @model_validator(mode="after")
    def _one_shape(self) -> Self:
        given = [to_camel(name) for name in _SHAPE if name in self.model_fields_set]
        if self.adapter is not None and given:
            raise ValueError(f"adapter has a shape of its own; leave {', '.join(given)} out")
        return self
