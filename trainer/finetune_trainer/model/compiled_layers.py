"""Compiles the parts of transformer layers with torch.compile (spec.training.torchCompile, decisions/533)."""

import shutil
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from finetune_trainer.errors import InvalidSpec

_COMPILERS = {"cpu": ("g++", "clang++"), "cuda": ("gcc", "clang")}  # on GPUs, Triton compiles its launchers


def check_compiler(device: torch.device) -> None:
    """Raise InvalidSpec if the image lacks the compiler that torch.compile runs for this device."""
    names = _COMPILERS[device.type]
    if not any(map(shutil.which, names)):
        raise InvalidSpec(
            f"spec.training.torchCompile: the image contains no {' or '.join(names)}, which torch.compile needs on a"
            f" {'CPU' if device.type == 'cpu' else 'GPU'}; remove torchCompile, or use an image with a compiler"
        )


def compile_layers(model: Any, *, backend: str = "inductor") -> int:
    """Compile attention, MLP and norms of each layer of the language model, and return the number of layers.

    Each is compiled at its first call, for rows of any length. A layer is not compiled as a whole: with recomputation
    it calls torch.utils.checkpoint, which cannot be compiled together with attention without padding. Names of
    parameters do not change. backend: compiler of torch.compile.
    """
    from torch._inductor import config  # takes a second to import

    config.compile_threads = 1  # worker processes would import torch and need memory of their own
    base_model = model.get_base_model() if hasattr(model, "get_base_model") else model
    layers = [layer for layer in base_model.get_decoder().modules() if isinstance(layer, GradientCheckpointingLayer)]
    for layer in layers:
        for part in layer.children():
            part.compile(dynamic=True, backend=backend)
    return len(layers)
