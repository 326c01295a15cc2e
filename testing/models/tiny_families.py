"""Configs and folders of tiny text models of families that differ from Llama and Qwen, with random weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Glm4MoeConfig,
    GptOssConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from testing.models import tiny_text

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}


def _build_gemma2_config(vocabulary_size: int) -> PretrainedConfig:
    return Gemma2Config(**SIZES, vocab_size=vocabulary_size, sliding_window=64, query_pre_attn_scalar=8)


def _build_gpt_oss_config(vocabulary_size: int) -> PretrainedConfig:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return GptOssConfig(**SIZES, **experts, vocab_size=vocabulary_size, sliding_window=64)


def _build_qwen3_moe_config(vocabulary_size: int) -> PretrainedConfig:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "router_aux_loss_coef": 0.01}
    return Qwen3MoeConfig(**SIZES, **experts, vocab_size=vocabulary_size)


def _build_mixtral_config(vocabulary_size: int) -> PretrainedConfig:
    return MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, vocab_size=vocabulary_size)


def _build_glm4_moe_config(vocabulary_size: int) -> PretrainedConfig:
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
    return Glm4MoeConfig(**SIZES, **experts, vocab_size=vocabulary_size)


CONFIGS: dict[str, Callable[[int], PretrainedConfig]] = {
    "gemma2": _build_gemma2_config,
    "gpt_oss": _build_gpt_oss_config,
    "qwen3_moe": _build_qwen3_moe_config,
    "mixtral": _build_mixtral_config,
    "glm4_moe": _build_glm4_moe_config,  # its routers have biases that are buffers
}
WITHOUT_SDPA = ("gemma2", "gpt_oss")  # their classes in transformers support eager attention and FlashAttention only


def build_config(model_type: str, *, vocabulary_size: int = 100) -> PretrainedConfig:
    return CONFIGS[model_type](vocabulary_size)


def build_model(model_type: str, *, vocabulary_size: int = 100, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(build_config(model_type, vocabulary_size=vocabulary_size))
    tiny_text.fill_saved_buffers(model)
    return model


def build(folder: Path, model_type: str) -> Path:
    """Create a model and its tokenizer in a folder and return the folder."""
    tokenizer = tiny_text.build_tokenizer()
    tokenizer.save_pretrained(folder)
    tiny_text.save_model(build_model(model_type, vocabulary_size=len(tokenizer)), folder)
    return folder
