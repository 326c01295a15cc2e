"""Saves full weights or adapters in the format of transformers or peft."""

from pathlib import Path
from typing import Any

import torch

from finetune_trainer.model.lora import TRAINED_ADAPTER


def save_weights(model: Any, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Save full weights in the format of transformers, or the trained adapter in the format of peft."""
    if not hasattr(model, "peft_config"):
        model.to(next(iter(weights.values())).dtype).save_pretrained(folder, state_dict=weights)
        return
    # By default, peft queries the Hub to check whether the vocabulary was resized.
    options = {"save_embedding_layers": False, "selected_adapters": [TRAINED_ADAPTER]}
    model.save_pretrained(folder, state_dict=weights, **options)
