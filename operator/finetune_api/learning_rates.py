"""The peak learning rates of a job: what its spec says, or the usual, scaled to its effective batch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from finetune_api.batch import Batch
from finetune_api.v1alpha1.job import FineTuneJobSpec

_LORA, _FULL = 1e-4, 1e-5


@dataclass(frozen=True)
class Rates:
    """One for everything but the parts of a vision-language model that have one of their own."""

    usual: float
    own: Mapping[str, float]  # by part
    scaling: str = ""  # in words; empty: none

    def of(self, part: str) -> float:
        return self.own.get(part, self.usual)

    def __str__(self) -> str:
        named = (f"{self.usual:g}", *(f"{part} {rate:g}" for part, rate in self.own.items()))
        return ", ".join(named) + (f" ({self.scaling})" if self.scaling else "")


def resolve_rates(spec: FineTuneJobSpec, batch: Batch) -> Rates:
    """Of a job that the operator's own trainer runs."""
    training, factor, words = spec.training, 1.0, ""
    usual = training.learning_rate or (_LORA if spec.lora else _FULL) / (10 if spec.dpo else 1)
    if scaling := training.lr_scaling:
        factor, words = batch.effective / scaling.base_batch_size, f"{batch.effective} / {scaling.base_batch_size}"
        if scaling.rule == "sqrt":
            factor, words = math.sqrt(factor), f"sqrt({words})"
        words = f"{factor:g} = {words} times what is given"
    own = {part: rate * factor for part, rate in training.rates_of_parts.items() if rate is not None}
    return Rates(usual * factor, own, words)
