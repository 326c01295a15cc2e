"""Defines the training methods spec.sft and spec.dpo."""

from typing import ClassVar, Literal

from pydantic import Field

from finetune_api.v1alpha1.base import CelRule, CrossFieldRule, Model, ModelWithRules

METHODS = ("sft", "dpo")


class Sft(Model):
    """Supervised fine-tuning: cross entropy on the selected tokens."""

    loss_on: Literal["assistant", "lastTurn", "all"] = Field(
        default="assistant",
        description="Tokens in the loss: all assistant turns, the last assistant turn, or all tokens of the sample.",
    )


class Dpo(ModelWithRules):
    """Direct preference optimization (arXiv 2305.18290): rows with a chosen and a rejected completion."""

    beta: float = Field(
        default=0.1, gt=0, le=100, description="KL strength: higher keeps the policy closer to the reference model."
    )
    loss_type: Literal["sigmoid", "ipo", "hinge", "robust"] = Field(
        default="sigmoid",
        description="Loss: sigmoid (DPO), ipo (arXiv 2310.12036), hinge (SLiC), or robust (arXiv 2403.00409).",
    )
    label_smoothing: float | None = Field(
        default=None,
        gt=0,
        lt=0.5,
        description="Expected fraction of preferences with swapped completions; only with lossType robust.",
    )
    rpo_alpha: float | None = Field(
        default=None, gt=0, le=100, description="Weight of an SFT loss on the chosen completions (RPO); absent: none."
    )
    precompute_ref_log_probs: bool = Field(
        default=False,
        description="Compute the log-probabilities of the reference model once before training instead of in every"
        " epoch, and release the model if it is a separate one.",
    )

    rules: ClassVar[tuple[CrossFieldRule["Dpo"], ...]] = (
        CrossFieldRule.from_cel_rule(
            "labelSmoothing with robust loss",
            lambda dpo: (dpo.label_smoothing is not None) != (dpo.loss_type == "robust"),
            CelRule(
                "has(self.labelSmoothing) == (has(self.lossType) && self.lossType == 'robust')",
                "labelSmoothing requires lossType robust and vice versa; set both or neither",
            ),
        ),
    )
