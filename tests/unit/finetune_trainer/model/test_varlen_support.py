"""Tests which models are trained with attention over several sequences in one row."""

import pytest
from transformers import BloomConfig, Llama4TextConfig, PretrainedConfig

from finetune_trainer.model import varlen_support
from finetune_trainer.model.varlen_attention import VARLEN
from finetune_trainer.model.varlen_support import find_varlen_obstacle, select_text_attention
from finetune_trainer.vision.families import FAMILIES
from finetune_trainer.vision.towers import build_on_meta
from testing.models import attention_families, tiny_families, tiny_vision


def build_vision_config(model_type: str) -> PretrainedConfig:
    tokenizer = tiny_vision.build_tokenizer(model_type)
    return tiny_vision.RECIPES[model_type].build_config(len(tokenizer), tokenizer)


@pytest.mark.parametrize("family", attention_families.CONFIGS)
def test_models_of_attention_layers_are_supported(family: str) -> None:
    assert find_varlen_obstacle(attention_families.CONFIGS[family](), text_only=False) is None


@pytest.mark.parametrize("model_type", tiny_vision.RECIPES)
def test_families_that_support_packing_are_supported(model_type: str) -> None:
    obstacle = find_varlen_obstacle(build_vision_config(model_type), text_only=False)

    assert (obstacle is None) == FAMILIES[model_type].supports_packing


def test_the_text_part_of_a_model_is_supported_although_its_images_are_not() -> None:
    assert find_varlen_obstacle(build_vision_config("gemma3"), text_only=True) is None


@pytest.mark.parametrize(
    ("config", "obstacle"),
    [
        (tiny_families.CONFIGS["gemma2"](64), "does not support softcap"),
        (tiny_families.CONFIGS["gpt_oss"](64), "does not support s_aux"),
        (attention_families.build_linear_attention_config(), "the model has layers of linear attention"),
        (attention_families.build_phimoe_config(), "layer 0 does not pass its sliding window"),
        (Llama4TextConfig(num_hidden_layers=4), "the model has layers of chunked attention"),
        (BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4), "does not support FlashAttention"),
    ],
    ids=lambda value: value.model_type if isinstance(value, PretrainedConfig) else "",
)
def test_the_obstacle_is_named(config: PretrainedConfig, obstacle: str) -> None:
    assert obstacle in str(find_varlen_obstacle(config, text_only=False))


def test_a_model_with_layers_that_do_not_call_the_function_is_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such layers, for example state space models, would mix the sequences."""
    config = attention_families.CONFIGS["llama"]()
    monkeypatch.setattr(varlen_support, "_run_trial", lambda *_, **__: ([False, False], [None]))

    assert find_varlen_obstacle(config, text_only=False) == "only 1 of 2 layers use the attention function"


def test_only_the_text_part_gets_the_implementation() -> None:
    config = build_vision_config("qwen2_vl")

    model = build_on_meta(config, attn_implementation=select_text_attention(config, VARLEN))

    assert model.config.text_config._attn_implementation == VARLEN
    assert model.config.vision_config._attn_implementation == "sdpa"
    assert select_text_attention(attention_families.CONFIGS["llama"](), VARLEN) == VARLEN
