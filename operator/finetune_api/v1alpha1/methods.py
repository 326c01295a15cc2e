"""Training methods, as the spec says them."""

from typing import Literal, Self

from pydantic import ConfigDict, Field, model_validator

from finetune_api.v1alpha1.base import Model, validations


class Sft(Model):
    """Supervised fine-tuning: cross entropy on the words to learn."""

    loss_on: Literal["assistant", "lastTurn", "all"] = Field(
        default="assistant",
        description="What is learned: every turn of the assistant, its last turn alone, or every token of the sample.",
    )


class Dpo(Model):
    """Direct preference optimisation (arXiv 2305.18290): rows with a chosen and a rejected answer."""

    beta: float = Field(default=0.1, gt=0, le=100, description="How strongly the reference model is held on to.")
    loss_type: Literal["sigmoid", "ipo", "hinge", "robust"] = Field(
        default="sigmoid", description="DPO itself, IPO (arXiv 2310.12036), SLiC's hinge, or robust (arXiv 2403.00409)."
    )
    label_smoothing: float | None = Field(
        default=None, gt=0, lt=0.5, description="Share of preferences believed to be flipped; of lossType robust."
    )
    rpo_alpha: float | None = Field(
        default=None, gt=0, le=100, description="Weight of an SFT term on the chosen answers (RPO); absent: none."
    )

    model_config = ConfigDict(
        json_schema_extra=validations(
            (
                "has(self.labelSmoothing) == (has(self.lossType) && self.lossType == 'robust')",
                "labelSmoothing belongs to lossType robust; set both or neither",
            )
        )
    )

    @model_validator(mode="after")
    def _smoothing_is_robust(self) -> Self:
        if (self.label_smoothing is not None) != (self.loss_type == "robust"):
            raise ValueError("labelSmoothing belongs to lossType robust; set both or neither")
        return self
