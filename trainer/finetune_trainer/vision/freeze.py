"""Which parts of a model are trained: vision, aligner and language, each as a whole."""

import re
from collections.abc import Collection

import torch

from finetune_trainer.errors import InvalidSpec
from finetune_trainer.vision.families import Family
from finetune_trainer.vision.processor import Vision

GROUPS = ("vision", "aligner", "language")
USUALLY_FROZEN = ("vision", "aligner")
_ADAPTED = "base_model.model."  # what peft puts before every name


def frozen_groups(asked: Collection[str] | None) -> tuple[str, ...]:
    """What the spec says, or the usual."""
    frozen = tuple(group for group in GROUPS if group in (USUALLY_FROZEN if asked is None else asked))
    if len(frozen) == len(GROUPS):
        raise InvalidSpec(
            "spec.model.freeze: all of vision, aligner and language are frozen; leave one out to train it"
        )
    return frozen


def group_of(name: str, family: Family) -> str:
    """Of a parameter or module, by its name, also where peft has wrapped the model."""
    name = name.removeprefix(_ADAPTED)
    if any(_is_in(name, prefix) for prefix in family.aligner):
        return "aligner"
    return "vision" if _is_in(name, family.vision) else "language"


def freeze(model: torch.nn.Module, family: Family, frozen: Collection[str], *, unreached: str | None = None) -> None:
    """What no image runs through is frozen too: it would never get a gradient, for which DDP waits."""
    for name, parameter in model.named_parameters():
        if group_of(name, family) in frozen or (unreached and re.match(unreached, name)):
            parameter.requires_grad = False


def frozen_modules(family: Family, frozen: Collection[str], *, unreached: str | None = None) -> str | None:
    """A pattern of the names of all frozen modules, as peft excludes them; None where nothing is."""
    inside = {
        "aligner": _beginning(family.aligner),
        "vision": f"(?!{_beginning(family.aligner)}){_beginning((family.vision,))}",
        "language": f"(?!{_beginning((*family.aligner, family.vision))})",
    }
    patterns = [*(inside[group] for group in frozen), *([unreached] if unreached else [])]
    return "|".join(f"{pattern}.*" for pattern in patterns) or None


def freeze_as_asked(model: torch.nn.Module, vision: Vision, frozen: Collection[str]) -> str | None:
    """Freezes these groups; gives the pattern of the modules that get no adapters."""
    family, unreached = vision.family, vision.family.unreached(vision.seen.config)
    freeze(model, family, frozen, unreached=unreached)
    return frozen_modules(family, frozen, unreached=unreached)


def trains_sight(model: torch.nn.Module, family: Family) -> bool:
    """Something of vision or aligner is trained, itself or by adapters."""
    return any(
        parameter.requires_grad and group_of(name, family) != "language" for name, parameter in model.named_parameters()
    )


def _is_in(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def _beginning(prefixes: Collection[str]) -> str:
    return f"(?:{'|'.join(map(re.escape, prefixes))})(?=\\.|$)"
