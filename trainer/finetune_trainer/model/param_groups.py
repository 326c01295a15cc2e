"""The trained parameters, grouped by the part of the model that they belong to and the rate at which it learns."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from finetune_api.learning_rates import Rates
from finetune_trainer.errors import InvalidSpec
from finetune_trainer.model.parameter_size import whole_size
from finetune_trainer.parallel.full_state import named_trained
from finetune_trainer.vision.families import Family
from finetune_trainer.vision.freeze import GROUPS, group_of


@dataclass(frozen=True)
class Size:
    """Numbers in a part of a model, and how many of them are trained."""

    trained: int = 0
    total: int = 0

    def __str__(self) -> str:
        return f"{self.trained:,} of {self.total:,} ({self.trained / self.total:.2%})"


def measure(model: torch.nn.Module, family: Family | None) -> dict[str, Size]:
    """By part of a vision-language model. Of another, all is language."""
    sizes = dict.fromkeys(GROUPS if family else ("language",), Size())
    for name, parameter in model.named_parameters():
        group = group_of(name, family) if family else "language"
        size = whole_size(parameter)
        before = sizes[group]
        sizes[group] = Size(before.trained + size * parameter.requires_grad, before.total + size)
    return sizes


def check_rates(model: torch.nn.Module, family: Family | None, rates: Rates) -> None:
    """Raises InvalidSpec for a rate of a part of which nothing is trained, which the spec alone does not tell."""
    sizes = measure(model, family)
    for part in rates.own:
        if part not in sizes or not sizes[part].trained:
            raise InvalidSpec(
                f"spec.training.{part}LearningRate: nothing of {part} is trained: adapters fit no module there, or"
                " spec.lora.targetModules names none; correct it, or leave the rate out"
            )


def parameter_groups(
    model: torch.nn.Module, family: Family, rates: Rates, *, decayed: Collection[str], weight_decay: float
) -> list[dict[str, Any]]:
    """As torch's optimizers take them. The first one's rate is what is logged: that of language, if it is trained."""

    def trained(part: str, *, decays: bool) -> list[torch.nn.Parameter]:
        return [
            parameter
            for name, parameter in named_trained(model)
            if group_of(name, family) == part and (name in decayed) is decays
        ]

    def groups() -> Iterator[dict[str, Any]]:
        for part in sorted(GROUPS, key=lambda part: part in rates.own):
            for decays in (True, False):
                if parameters := trained(part, decays=decays):
                    decay = weight_decay if decays else 0.0
                    yield {"params": parameters, "lr": rates.of(part), "weight_decay": decay}

    return list(groups())
