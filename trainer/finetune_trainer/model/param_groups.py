"""Divides trained parameters into groups by model part (vision, aligner, language) and weight decay."""

import importlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from finetune_api.learning_rates import LearningRates
from finetune_trainer.errors import InvalidSpec
from finetune_trainer.model.parameter_size import get_full_numel
from finetune_trainer.parallel.model_state import iterate_trained_parameters
from finetune_trainer.vision.families import VisionFamily
from finetune_trainer.vision.freeze import GROUPS, find_group


@dataclass(frozen=True)
class ParameterCount:
    """Number of trained parameters and of all parameters in a model part."""

    trained: int = 0
    total: int = 0

    def __str__(self) -> str:
        return f"{self.trained:,} of {self.total:,} ({self.trained / self.total:.2%})"


def count_parameters(model: torch.nn.Module, family: VisionFamily | None) -> dict[str, ParameterCount]:
    """Count the parameters of each model part; a text model has only the part `language`."""
    counts = dict.fromkeys(GROUPS if family else ("language",), ParameterCount())
    for name, parameter in model.named_parameters():
        group = find_group(name, family) if family else "language"
        size = get_full_numel(parameter)
        previous_count = counts[group]
        counts[group] = ParameterCount(
            previous_count.trained + size * parameter.requires_grad, previous_count.total + size
        )
    return counts


def check_learning_rates(model: torch.nn.Module, family: VisionFamily | None, rates: LearningRates) -> None:
    """Raise InvalidSpec if a model part with a separate learning rate has no trained parameters."""
    counts = count_parameters(model, family)
    for part in rates.part_rates:
        if part not in counts or not counts[part].trained:
            raise InvalidSpec(
                f"spec.training.{part}LearningRate: no parameter of {part} is trained: adapters fit no module there,"
                " or spec.lora.targetModules names none; correct it, or leave the rate out"
            )


def build_parameter_groups(
    model: torch.nn.Module,
    family: VisionFamily,
    rates: LearningRates,
    *,
    decayed_names: Collection[str],
    weight_decay: float,
) -> list[dict[str, Any]]:
    """Return the parameter groups of a torch optimizer (decisions/513).

    The trainer logs the learning rate of the first group, so groups with the default rate come first.
    decayed_names: names of the parameters with weight decay.
    """

    def select_parameters(part: str, *, has_decay: bool) -> list[torch.nn.Parameter]:
        return [
            parameter
            for name, parameter in iterate_trained_parameters(model)
            if find_group(name, family) == part and (name in decayed_names) is has_decay
        ]

    def yield_groups() -> Iterator[dict[str, Any]]:
        for part in sorted(GROUPS, key=lambda part: part in rates.part_rates):
            for has_decay in (True, False):
                if parameters := select_parameters(part, has_decay=has_decay):
                    decay = weight_decay if has_decay else 0.0
                    yield {"params": parameters, "lr": rates.get_rate(part), "weight_decay": decay}

    return list(yield_groups())


def keep_embedding_moments_in_float32(model: torch.nn.Module) -> None:
    """Let bitsandbytes keep the moments of embeddings in float32.

    transformers does so only for optimizers that it creates itself.
    """
    # imported here, because it is hidden from jobs that do not use it (decisions/516)
    manager: Any = importlib.import_module("bitsandbytes.optim").GlobalOptimManager.get_instance()
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})
