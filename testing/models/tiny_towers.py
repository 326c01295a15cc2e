"""Build tiny models with vision and audio towers, of families that are trained on text only."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForMultimodalLM,
    Gemma4AudioConfig,
    Gemma4Config,
    Gemma4TextConfig,
    Gemma4VisionConfig,
    Llama4Config,
    Llama4TextConfig,
    Llama4VisionConfig,
    PretrainedConfig,
)

from testing.models import tiny_text

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
_TEXT = {**_SIZES, "max_position_embeddings": 512, "initializer_range": 0.1, "pad_token_id": 0, "eos_token_id": 2}
PROCESSOR_SETTINGS = {"image_processor_type": "unused", "size": {"height": 32, "width": 32}}


def _build_gemma4_config(vocabulary_size: int) -> PretrainedConfig:
    text = Gemma4TextConfig(
        **_TEXT,
        vocab_size=vocabulary_size,
        vocab_size_per_layer_input=vocabulary_size,
        hidden_size_per_layer_input=8,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"],
    )
    vision = Gemma4VisionConfig(**{**_SIZES, "num_key_value_heads": 4}, position_embedding_size=64)
    audio = Gemma4AudioConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, output_proj_dims=32)
    return Gemma4Config(text_config=text, vision_config=vision, audio_config=audio)


def _build_llama4_config(vocabulary_size: int) -> PretrainedConfig:
    text = Llama4TextConfig(
        **_TEXT, vocab_size=vocabulary_size, intermediate_size_mlp=64, num_local_experts=2, bos_token_id=None
    )
    vision = Llama4VisionConfig(
        hidden_size=32,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        image_size=56,
        vision_output_dim=32,
        projector_input_dim=32,
        projector_output_dim=32,
    )
    return Llama4Config(text_config=text, vision_config=vision)


CONFIGS: dict[str, Callable[[int], PretrainedConfig]] = {
    "gemma4": _build_gemma4_config,  # vision and audio
    "llama4": _build_llama4_config,
}


def build_config(model_type: str, *, vocabulary_size: int = 100) -> PretrainedConfig:
    return CONFIGS[model_type](vocabulary_size)


def build(folder: Path, model_type: str) -> Path:
    """Create a model, its tokenizer and a processor file in a folder and return the folder."""
    tokenizer = tiny_text.build_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = build_config(model_type, vocabulary_size=len(tokenizer))
    model = AutoModelForMultimodalLM.from_config(config)
    tiny_text.fill_saved_buffers(model)
    tiny_text.save_model(model, folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR_SETTINGS), encoding="utf-8")
    return folder
