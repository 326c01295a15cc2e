"""Freezes parts of a vision-language model: vision, aligner and language, each as a whole."""

import re
from collections.abc import Collection

import torch

from finetune_trainer.errors import InvalidSpec
from finetune_trainer.vision.families import VisionFamily
from finetune_trainer.vision.processor import VisionProcessor

GROUPS = ("vision", "aligner", "language")
DEFAULT_FROZEN = ("vision", "aligner")
_PEFT_PREFIX = "base_model.model."  # prefix that peft adds to every name


def resolve_frozen_groups(specified: Collection[str] | None) -> tuple[str, ...]:
    """Return the groups to freeze: those of spec.model.freeze, or the default without it.

    Raises: InvalidSpec if all groups are frozen.
    """
    frozen = tuple(group for group in GROUPS if group in (DEFAULT_FROZEN if specified is None else specified))
    if len(frozen) == len(GROUPS):
        raise InvalidSpec(
            "spec.model.freeze: all of vision, aligner and language are frozen; leave one out to train it"
        )
    return frozen


def find_group(name: str, family: VisionFamily) -> str:
    """Return the group of a parameter or module by its name, with or without the prefix of peft."""
    name = name.removeprefix(_PEFT_PREFIX)
    if any(_has_module_prefix(name, prefix) for prefix in family.aligner_prefixes):
        return "aligner"
    return "vision" if _has_module_prefix(name, family.vision_prefix) else "language"


def freeze_parameters(
    model: torch.nn.Module, family: VisionFamily, frozen: Collection[str], *, unused: str | None = None
) -> None:
    """Freeze the groups, and modules whose name matches `unused`: their missing gradients would block DDP."""
    for name, parameter in model.named_parameters():
        if find_group(name, family) in frozen or (unused and re.match(unused, name)):
            parameter.requires_grad = False


def frozen_module_pattern(family: VisionFamily, frozen: Collection[str], *, unused: str | None = None) -> str | None:
    """Return a regex for the names of all frozen modules, as peft's `exclude_modules`; None if none is frozen."""
    aligner, vision = family.aligner_prefixes, (family.vision_prefix,)
    group_patterns = {
        "aligner": _prefix_pattern(aligner),
        "vision": f"(?!{_prefix_pattern(aligner)}){_prefix_pattern(vision)}",
        "language": f"(?!{_prefix_pattern((*aligner, *vision))})",
    }
    patterns = [*(group_patterns[group] for group in frozen), *([unused] if unused else [])]
    return "|".join(f"{pattern}.*" for pattern in patterns) or None


def freeze_groups(model: torch.nn.Module, vision: VisionProcessor, frozen: Collection[str]) -> str | None:
    """Freeze the groups and return the regex of the modules that get no adapters."""
    family, unused = vision.family, vision.family.unused_modules(vision.handles.config)
    freeze_parameters(model, family, frozen, unused=unused)
    return frozen_module_pattern(family, frozen, unused=unused)


def trains_vision(model: torch.nn.Module, family: VisionFamily) -> bool:
    """Return whether vision or aligner has trainable parameters, including adapters."""
    return any(
        parameter.requires_grad and find_group(name, family) != "language"
        for name, parameter in model.named_parameters()
    )


def _has_module_prefix(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def _prefix_pattern(prefixes: Collection[str]) -> str:
    return f"(?:{'|'.join(map(re.escape, prefixes))})(?=\\.|$)"
