"""Freezes parameter groups (vision, aligner, language) of a vision-language model."""

import re
from collections.abc import Collection

import torch

from finetune_trainer.errors import InvalidSpec
from finetune_trainer.vision.families import VisionFamily
from finetune_trainer.vision.processor import VisionProcessor

GROUPS = ("vision", "aligner", "language")
DEFAULT_FROZEN = ("vision", "aligner")
PEFT_PREFIX = "base_model.model."  # peft adds this prefix to all parameter names


def resolve_frozen_groups(specified_groups: Collection[str] | None) -> tuple[str, ...]:
    """Return the groups to freeze, which are the value of spec.model.freeze or the default.

    Raises: InvalidSpec if all groups are frozen.
    """
    frozen_groups = tuple(
        group for group in GROUPS if group in (DEFAULT_FROZEN if specified_groups is None else specified_groups)
    )
    if len(frozen_groups) == len(GROUPS):
        raise InvalidSpec(
            "spec.model.freeze: all of vision, aligner and language are frozen; leave one out to train it"
        )
    return frozen_groups


def find_group(name: str, family: VisionFamily) -> str:
    """Return the group of a parameter or module with this name, with or without the prefix of peft."""
    name = name.removeprefix(PEFT_PREFIX)
    if any(_has_module_prefix(name, prefix) for prefix in family.aligner_prefixes):
        return "aligner"
    return "vision" if _has_module_prefix(name, family.vision_prefix) else "language"


def freeze_parameters(
    model: torch.nn.Module, family: VisionFamily, frozen_groups: Collection[str], *, unused_pattern: str | None = None
) -> None:
    """Freeze the groups and the unused modules.

    unused_pattern: regex for modules that get no gradients, because DDP would wait for their gradients.
    """
    for name, parameter in model.named_parameters():
        if find_group(name, family) in frozen_groups or (unused_pattern and re.match(unused_pattern, name)):
            parameter.requires_grad = False


def build_frozen_module_pattern(
    family: VisionFamily, frozen_groups: Collection[str], *, unused_pattern: str | None = None
) -> str | None:
    """Return a regex that matches all frozen modules, for peft's `exclude_modules`, or None if no module is frozen."""
    aligner, vision = family.aligner_prefixes, (family.vision_prefix,)
    group_patterns = {
        "aligner": _build_prefix_pattern(aligner),
        "vision": f"(?!{_build_prefix_pattern(aligner)}){_build_prefix_pattern(vision)}",
        "language": f"(?!{_build_prefix_pattern((*aligner, *vision))})",
    }
    patterns = [*(group_patterns[group] for group in frozen_groups), *([unused_pattern] if unused_pattern else [])]
    return "|".join(f"{pattern}.*" for pattern in patterns) or None


def freeze_groups(model: torch.nn.Module, vision: VisionProcessor, frozen_groups: Collection[str]) -> str | None:
    """Freeze the groups and return a regex for modules that must not have adapters, or None."""
    family, unused_pattern = vision.family, vision.family.get_unused_modules(vision.components.config)
    freeze_parameters(model, family, frozen_groups, unused_pattern=unused_pattern)
    return build_frozen_module_pattern(family, frozen_groups, unused_pattern=unused_pattern)


def has_trained_vision_weights(model: torch.nn.Module, family: VisionFamily) -> bool:
    """Return whether the vision tower or the aligner has trainable parameters, including adapters."""
    return any(
        parameter.requires_grad and find_group(name, family) != "language"
        for name, parameter in model.named_parameters()
    )


def _has_module_prefix(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def _build_prefix_pattern(prefixes: Collection[str]) -> str:
    return f"(?:{'|'.join(map(re.escape, prefixes))})(?=\\.|$)"
