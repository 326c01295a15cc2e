"""Configs of tiny text models whose attention differs: grouped heads, sliding windows, MLA, linear attention."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    CpmAntConfig,
    DeepseekV3Config,
    DeepseekV4Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PhimoeConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    RobertaConfig,
)

VOCABULARY = 64
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MLA = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_DEEPSEEK_EXPERTS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}


def _build_gemma3_config() -> PretrainedConfig:
    """Build a config with layers of both types, whose sliding window is shorter than most rows of the tests."""
    layer_types = ["sliding_attention", "full_attention"]
    return Gemma3TextConfig(**_SIZES, head_dim=8, sliding_window=4, layer_types=layer_types, query_pre_attn_scalar=8)


def _build_deepseek_config() -> PretrainedConfig:
    sizes = {**_SIZES, "num_key_value_heads": 4}
    return DeepseekV3Config(**sizes, **_MLA, **_DEEPSEEK_EXPERTS, num_experts_per_tok=2, moe_intermediate_size=32)


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {  # models whose layers are all attention over sequences
    "llama": lambda: LlamaConfig(**_SIZES),
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=8),
    "mistral": lambda: MistralConfig(**_SIZES, sliding_window=4),
    "gemma3_text": _build_gemma3_config,
    "phi3": lambda: Phi3Config(**_SIZES),
    "qwen3_moe": lambda: Qwen3MoeConfig(**_SIZES, **_EXPERTS, head_dim=8),
    "deepseek_v3": _build_deepseek_config,
}


def build_linear_attention_config() -> PretrainedConfig:
    """Build a config whose first layer carries state from one token to the next."""
    layer_types = ["linear_attention", "full_attention"]
    return Qwen3NextConfig(**_SIZES, head_dim=8, layer_types=layer_types, num_experts=0)


def build_deepseek_v4_config() -> PretrainedConfig:
    """Build a config whose second layer also attends to blocks of 128 tokens, found by the position ids."""
    layer_types = ["sliding_attention", "heavily_compressed_attention"]
    mla = {"q_lora_rank": 16, "o_lora_rank": 8, "o_groups": 2, "head_dim": 16, "partial_rotary_factor": 0.5}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "hc_mult": 2}
    sizes = {name: size for name, size in _SIZES.items() if name not in ("intermediate_size", "num_key_value_heads")}
    mlp_types = ["moe", "moe"]
    return DeepseekV4Config(
        **sizes, **mla, **experts, layer_types=layer_types, mlp_layer_types=mlp_types, sliding_window=8
    )


def build_phimoe_config() -> PretrainedConfig:
    """Build a config with a sliding window, which the model's layers do not pass to their attention."""
    return PhimoeConfig(**_SIZES, num_local_experts=4, sliding_window=16)


def build_roberta_config() -> PretrainedConfig:
    """Build a config of a decoder whose position ids begin after the id of the padding token."""
    sizes = {**_SIZES, "pad_token_id": 1}
    return RobertaConfig(**sizes, is_decoder=True, max_position_embeddings=514, hidden_dropout_prob=0.0)


def build_cpmant_config() -> PretrainedConfig:
    """Build a config of a model that expects padding on the left."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    return CpmAntConfig(**sizes, dim_head=8, dim_ff=64, prompt_length=2, prompt_types=3, segment_types=3, init_std=0.3)


def build_model(config: PretrainedConfig, **options: Any) -> PreTrainedModel:
    """Build a model with random weights in evaluation mode. options: arguments of `from_config`."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, **options)
    return model.eval()
