"""Configs of the tiny model families that are drawn, and what their types do not support."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from testing.models.tiny_families import SIZES

_GPT2_SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "initializer_range": 0.1}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LONGROPE = {
    "original_max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
}


@dataclass(frozen=True)
class Family:
    """Options of a config beside the sizes; `lacks` names what the type does not support.

    model_type: the type if the family has another name.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, Any] = field(default_factory=lambda: SIZES)
    lacks: tuple[str, ...] = ()
    model_type: str | None = None


FAMILIES: Mapping[str, Family] = {
    "llama": Family({"tie_word_embeddings": False}),
    "qwen2": Family({"tie_word_embeddings": True}),
    "qwen3": Family({"tie_word_embeddings": True}),
    "mistral": Family({"sliding_window": 24}),
    "phi3": Family({"sliding_window": None, **_NO_DROPOUT}, lacks=("q_proj",)),
    "longrope": Family({"sliding_window": None, **_NO_DROPOUT, **_LONGROPE}, lacks=("q_proj",), model_type="phi3"),
    "cohere": Family({"logit_scale": 0.25, "tie_word_embeddings": True}),
    "granite": Family(
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0, "attention_bias": True}
    ),
    "gemma2": Family({"sliding_window": 24, "query_pre_attn_scalar": 8}, lacks=("sdpa",)),
    "gpt2": Family(_NO_DROPOUT, sizes=_GPT2_SIZES, lacks=("q_proj", "all-linear")),
    # its forward pass gives no position ids to the masks, so that packs are not isolated, and are refused
    "gpt_oss": Family({**_LOCAL_EXPERTS, "sliding_window": 24}, lacks=("sdpa", "all-linear", "packing")),
    "qwen3_moe": Family(_EXPERTS, lacks=("all-linear",)),
    "mixtral": Family({**_LOCAL_EXPERTS, "sliding_window": None}, lacks=("all-linear",)),
}
# Sizes of any other causal type of transformers, as far as its config has a field of the name
GENERIC_SIZES: Mapping[str, Any] = {
    **SIZES,
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("first_k_dense_replace", "n_group", "topk_group"), 1),
    "num_experts_per_tok": 2,
    "is_decoder": True,
}
EXPERTS = ("gpt_oss", "mixtral", "qwen3_moe")
SWITCHING = ("longrope",)  # their rotary embeddings depend on the longest row of a forward pass
BIASED = ("granite", "qwen2")
TIED = ("cohere", "gemma2", "gpt2", "qwen2", "qwen3")


def get_family(model_type: str) -> Family:
    """Return the family, or one without options for another type."""
    return FAMILIES.get(model_type, Family())


def choose_generic_options(default_config: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """Return small sizes, and no dropout, for the fields of a config. aliases: further names of its fields."""
    sizes = {name: value for name, value in GENERIC_SIZES.items() if name in default_config or name in aliases}
    if "kv_lora_rank" in default_config:  # latent attention has no grouped heads
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    dropout = {name: 0.0 for name, value in default_config.items() if "drop" in name and isinstance(value, float)}
    return sizes | dropout
