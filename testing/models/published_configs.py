"""Write the configs of published models, whose memory the how-to pages forecast.

The tokenizers are those of tiny models: a forecast depends on the number of tokens and not on their ids.
"""

from pathlib import Path
from typing import Any

from transformers import (
    GotOcr2ImageProcessorPil,
    InternVLConfig,
    InternVLVisionConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen2VLImageProcessorPil,
)

from testing.models import tiny_vision

QWEN2_7B: dict[str, Any] = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
QWEN2_1_5B: dict[str, Any] = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}


def write_qwen2_5_7b(folder: Path) -> None:
    """Write the config of Qwen2.5-7B-Instruct."""
    save(Qwen2Config(**QWEN2_7B, vocab_size=152064), folder)


def write_qwen2_5_1_5b(folder: Path) -> None:
    """Write the config of Qwen2.5-1.5B-Instruct."""
    save(Qwen2Config(**QWEN2_1_5B, vocab_size=151936), folder)


def write_qwen2_vl_7b(folder: Path) -> None:
    """Write the config, a tokenizer and the image processor of Qwen2-VL-7B-Instruct."""
    tokenizer = tiny_vision.build_tokenizer("qwen2_vl")
    tokenizer.save_pretrained(folder)
    names = ("vision_start", "vision_end", "image_pad", "video_pad")
    start, end, image, video = tokenizer.convert_tokens_to_ids([f"<|{name}|>" for name in names])
    ids = {"vision_start_token_id": start, "vision_end_token_id": end, "image_token_id": image, "video_token_id": video}
    tower = {"depth": 32, "embed_dim": 1280, "num_heads": 16, "hidden_size": 3584, "mlp_ratio": 4, "patch_size": 14}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    text = {**QWEN2_7B, "vocab_size": 152064, "rope_parameters": rope}
    save(Qwen2VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=False, **ids), folder)
    Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 12_845_056}).save_pretrained(folder)


def write_internvl3_8b(folder: Path) -> None:
    """Write the config, a tokenizer and the image processor of InternVL3-8B-hf."""
    tokenizer = tiny_vision.build_tokenizer("internvl")
    tokenizer.save_pretrained(folder)
    tower = InternVLVisionConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        image_size=[448, 448],
        patch_size=[14, 14],
        attention_bias=True,
    )
    image = tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>")
    text = Qwen2Config(**QWEN2_7B, vocab_size=151674)
    sizes = {"image_token_id": image, "image_seq_length": 256, "tie_word_embeddings": False}
    save(InternVLConfig(vision_config=tower, text_config=text, **sizes), folder)
    GotOcr2ImageProcessorPil(size={"height": 448, "width": 448}, max_patches=12).save_pretrained(folder)


def save(config: PretrainedConfig, folder: Path) -> None:
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
