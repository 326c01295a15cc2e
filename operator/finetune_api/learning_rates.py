"""Resolves the peak learning rates of a job: values from the spec or defaults, scaled to the effective batch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from finetune_api.batch import Batch
from finetune_api.v1alpha1.job import FineTuneJobSpec

_LORA_DEFAULT, _FULL_DEFAULT = 1e-4, 1e-5


@dataclass(frozen=True)
class LearningRates:
    """Peak learning rates of a model, with separate rates for some parts of a vision-language model."""

    default_rate: float
    part_rates: Mapping[str, float]
    scaling_description: str = ""  # factor and formula; empty if the rates are not scaled

    def get_rate(self, part: str) -> float:
        """Return the learning rate of a part of the model; the names of parts are those of model.freeze."""
        return self.part_rates.get(part, self.default_rate)

    def __str__(self) -> str:
        rates = (f"{self.default_rate:g}", *(f"{part} {rate:g}" for part, rate in self.part_rates.items()))
        return ", ".join(rates) + (f" ({self.scaling_description})" if self.scaling_description else "")


def resolve_learning_rates(spec: FineTuneJobSpec, batch: Batch) -> LearningRates:
    """Return the learning rates of a job, scaled if the spec sets lrScaling."""
    training, factor, scaling = spec.training, 1.0, ""
    default_rate = training.learning_rate or (_LORA_DEFAULT if spec.lora else _FULL_DEFAULT) / (10 if spec.dpo else 1)
    if rule := training.lr_scaling:
        factor, formula = batch.effective / rule.base_batch_size, f"{batch.effective} / {rule.base_batch_size}"
        if rule.rule == "sqrt":
            factor, formula = math.sqrt(factor), f"sqrt({formula})"
        scaling = f"{factor:g} = {formula} times the rates of the spec"
    part_rates = {part: rate * factor for part, rate in training.learning_rates_by_part.items() if rate is not None}
    return LearningRates(default_rate * factor, part_rates, scaling)
