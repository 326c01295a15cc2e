"""Restricts training to the text part of a model with vision, audio or speech towers (spec.model.textOnly)."""

import re
from collections.abc import Collection

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig

from finetune_trainer.errors import ModelError, first_line
from finetune_trainer.model.fake_weights import replace_meta_tensors
from finetune_trainer.vision.towers import build_on_meta

_PROBE_LENGTH = 4  # tokens


def find_unreached_modules(config: PretrainedConfig) -> tuple[str, ...]:
    """Return the modules and parameters of a model that get no gradient from text, such as its vision tower.

    Simulates a forward and backward pass with all layers on fake tensors, without weights (decisions/605). A name
    stands for all parameters below it. Raises: ModelError if the model cannot be trained on text alone.
    """
    if config.is_encoder_decoder:
        raise ModelError(f"models of type {config.model_type} cannot be trained on text alone: they have an encoder")
    try:
        model = build_on_meta(config, dtype=torch.bfloat16)
        with FakeTensorMode(), torch.enable_grad():
            replace_meta_tensors(model)
            ids = torch.zeros(1, _PROBE_LENGTH, dtype=torch.int64)
            model.train()(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.sum().backward()
    except Exception as error:  # any model code may fail without media or on fake tensors
        raise ModelError(
            f"models of type {config.model_type} cannot be trained on text alone: {first_line(error)}"
        ) from error
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    reached = [name for name, gradient in gradients.items() if gradient is not None]
    reached_prefixes = {prefix for name in reached for prefix in _list_prefixes(name)}
    unreached = [name for name, gradient in gradients.items() if gradient is None]
    return tuple(dict.fromkeys(_find_shortest_prefix(name, reached_prefixes) for name in unreached))


def freeze_modules(model: torch.nn.Module, modules: Collection[str]) -> None:
    """Freeze the parameters of the modules."""
    for name, parameter in model.named_parameters():
        if is_inside(name, modules):
            parameter.requires_grad = False


def build_module_pattern(modules: Collection[str]) -> str | None:
    """Return a regex that matches the modules and their submodules, for peft's `exclude_modules`; None if none."""
    return rf"(?:{'|'.join(map(re.escape, modules))})(?:\..*)?" if modules else None


def is_inside(name: str, modules: Collection[str]) -> bool:
    """Return whether a parameter or module is one of the modules or below one of them."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _list_prefixes(name: str) -> list[str]:
    """Return the names of all modules that contain the parameter, outermost first, and its own name."""
    parts = name.split(".")
    return [".".join(parts[: length + 1]) for length in range(len(parts))]


def _find_shortest_prefix(name: str, reached_prefixes: Collection[str]) -> str:
    """Return the outermost module that contains the parameter and no reached parameter."""
    return next(prefix for prefix in _list_prefixes(name) if prefix not in reached_prefixes)
