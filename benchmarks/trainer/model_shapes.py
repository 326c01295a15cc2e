"""Published model shapes, and small shapes of the same architectures; weights are random."""

from dataclasses import dataclass, field
from typing import Any

from transformers import LlavaConfig, PretrainedConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2VLConfig


@dataclass(frozen=True)
class BenchmarkModelShape:
    """Shape of a model. `family` is a family of testing.models.tiny_vision, or empty for a text model."""

    text_config: dict[str, int]
    tie_word_embeddings: bool = False
    family: str = ""
    vision_config: dict[str, Any] = field(default_factory=dict)

    def build_config(self, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
        text: dict[str, Any] = {
            **self.text_config,
            "max_position_embeddings": 32_768,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }
        text["vocab_size"] = max(text["vocab_size"], len(tokenizer))
        if not self.family:
            return Qwen2Config(**text, tie_word_embeddings=self.tie_word_embeddings)
        if self.family == "llava":
            image_token_id = tokenizer.convert_tokens_to_ids("<image>")
            patches = (self.vision_config["image_size"] // self.vision_config["patch_size"]) ** 2
            vision = {"model_type": "clip_vision_model", **self.vision_config}
            return LlavaConfig(
                text_config={"model_type": "llama", **text},
                vision_config=vision,
                image_token_id=image_token_id,
                image_seq_length=patches,
                tie_word_embeddings=self.tie_word_embeddings,
            )
        names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
        placeholder_tokens = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
        token_ids = dict(zip(names, tokenizer.convert_tokens_to_ids(placeholder_tokens), strict=True))
        half_head_dim = text["hidden_size"] // text["num_attention_heads"] // 2
        sections = [half_head_dim // 4, half_head_dim * 3 // 8, half_head_dim * 3 // 8]
        rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
        return Qwen2VLConfig(
            text_config={**text, "rope_parameters": rope},
            vision_config={**self.vision_config, "hidden_size": text["hidden_size"]},
            tie_word_embeddings=self.tie_word_embeddings,
            **token_ids,
        )


def _build_text_shape(
    hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int, num_kv_heads: int, vocab_size: int
) -> dict[str, int]:
    return {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "vocab_size": vocab_size,
    }


SMALL = BenchmarkModelShape(_build_text_shape(384, 1024, 8, 6, 2, 1024), tie_word_embeddings=True)  # 12M parameters
SHAPE_0_1B = BenchmarkModelShape(_build_text_shape(896, 4864, 6, 14, 2, 32_768), tie_word_embeddings=True)
QWEN2_5_0_5B = BenchmarkModelShape(_build_text_shape(896, 4864, 24, 14, 2, 151936), tie_word_embeddings=True)
QWEN2_5_3B = BenchmarkModelShape(_build_text_shape(2048, 11008, 36, 16, 2, 151936), tie_word_embeddings=True)
QWEN2_5_7B = BenchmarkModelShape(_build_text_shape(3584, 18944, 28, 28, 4, 152064))
QWEN2_VL_7B = BenchmarkModelShape(
    _build_text_shape(3584, 18944, 28, 28, 4, 152064),
    family="qwen2_vl",
    vision_config={"depth": 32, "embed_dim": 1280, "num_heads": 16, "mlp_ratio": 4, "patch_size": 14},
)
SMALL_QWEN2_VL = BenchmarkModelShape(
    _build_text_shape(256, 704, 4, 4, 2, 1024),
    tie_word_embeddings=True,
    family="qwen2_vl",
    vision_config={"depth": 4, "embed_dim": 128, "num_heads": 4, "mlp_ratio": 4, "patch_size": 14},
)
SMALL_LLAVA = BenchmarkModelShape(
    SMALL.text_config,
    tie_word_embeddings=True,
    family="llava",
    vision_config={
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "image_size": 56,
        "patch_size": 14,
    },
)
