"""Saves full weights or adapters, tokenizer and processors in the format of transformers or peft."""

from pathlib import Path
from typing import Any

import torch

from finetune_trainer.model.load import ModelDescription
from finetune_trainer.model.lora import TRAINED_ADAPTER
from finetune_trainer.vision.save_processor import copy_processor_files, save_processor


def save_weights(model: Any, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Save full weights in the format of transformers, or the trained adapter in the format of peft."""
    if not hasattr(model, "peft_config"):
        model.to(next(iter(weights.values())).dtype).save_pretrained(folder, state_dict=weights)
        return
    # By default, peft queries the Hub to check whether the vocabulary was resized.
    options = {"save_embedding_layers": False, "selected_adapters": [TRAINED_ADAPTER]}
    model.save_pretrained(folder, state_dict=weights, **options)


def save_tokenizer_and_processors(model_description: ModelDescription, folder: Path) -> None:
    """Save the tokenizer and, for a model with towers, its processors, which inference with media needs."""
    model_description.tokenizer.save_pretrained(folder)
    name, revision = model_description.local.name, model_description.local.revision
    if model_description.vision:
        save_processor(model_description.vision, name, revision, folder)
    elif model_description.frozen_modules:
        copy_processor_files(name, revision, folder)
