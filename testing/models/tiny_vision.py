"""Build a tiny vision-language model of each family with random weights, and chat rows with images and videos."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import AddedToken
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3TextConfig,
    InternVLConfig,
    InternVLVisionConfig,
    LlamaConfig,
    LlavaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SiglipVisionConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForImageTextToText
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from testing.models import tiny_text

_QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_QWEN_VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
_QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class ModelRecipe:
    """Recipe for building a tiny model of a model type."""

    image_placeholder: str  # image placeholder in the chat template
    special_tokens: tuple[str, ...]
    build_config: Callable[[int, PreTrainedTokenizerFast], PretrainedConfig]
    processor: Callable[[], Any]
    video_pixels: tuple[int, int] | None = None  # minimum and maximum number of pixels, if the model accepts videos


def _render_template(image_placeholder: str) -> str:
    return (
        "{%- for message in messages -%}{{ '<|im_start|>' + message['role'] + '\\n' }}"
        "{%- for part in message['content'] -%}"
        "{%- if part['type'] == 'image' -%}{{ '" + image_placeholder + "' }}"
        "{%- elif part['type'] == 'video' -%}{{ '" + _QWEN_VIDEO + "' }}{%- else -%}{{ part['text'] }}{%- endif -%}"
        "{%- endfor -%}{{ '<|im_end|>\\n' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
    )


def _get_qwen_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return dict(zip(names, tokenizer.convert_tokens_to_ids(list(_QWEN_TOKENS)), strict=True))


def _build_qwen2_vl_config(vocabulary: int, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    vision: dict[str, Any] = {
        "depth": 2,
        "embed_dim": 32,
        "num_heads": 2,
        "hidden_size": 32,
        "mlp_ratio": 2,
        "patch_size": 14,
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    text = {**_TEXT, "vocab_size": vocabulary, "rope_parameters": rope}
    return Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **_get_qwen_ids(tokenizer))


_QWEN_TOWER: dict[str, Any] = {  # vision tower of Qwen2.5-VL and later versions
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 64,
    "out_hidden_size": 32,
}


def _build_qwen2_5_vl_config(vocabulary: int, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    vision = {**_QWEN_TOWER, "fullatt_block_indexes": [1], "window_size": 56}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    text = {**_TEXT, "vocab_size": vocabulary, "rope_parameters": rope}
    return Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=True, **_get_qwen_ids(tokenizer)
    )


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _build_qwen3_vl_config(vocabulary: int, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    vision = {**_QWEN_TOWER, "patch_size": 16, "deepstack_visual_indexes": [0], "num_position_embeddings": 64}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    text = {**_TEXT, "vocab_size": vocabulary, "rope_parameters": rope, "head_dim": 8}
    return Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **_get_qwen_ids(tokenizer))


def _build_qwen3_vl_moe_config(vocabulary: int, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    vision = {**_QWEN_TOWER, "patch_size": 16, "deepstack_visual_indexes": [0], "num_position_embeddings": 64}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    text = {**_TEXT, **_EXPERTS, "vocab_size": vocabulary, "rope_parameters": rope, "head_dim": 8}
    return Qwen3VLMoeConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=True, **_get_qwen_ids(tokenizer)
    )


def _build_qwen3_5_sections(vocabulary: int) -> dict[str, Any]:
    """Return text and vision config of Qwen3.5 with one layer of linear and one of full attention."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    linear_attention = {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    # half of a head is rotated, so that the three axes of M-RoPE need 8 of 16 elements
    rope["partial_rotary_factor"] = 0.5
    text = {**_TEXT, **linear_attention, "vocab_size": vocabulary, "rope_parameters": rope, "head_dim": 16}
    vision = {**_QWEN_TOWER, "patch_size": 16, "num_position_embeddings": 64}
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": True}


def _build_qwen3_5_config(vocabulary: int, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    return Qwen3_5Config(**_build_qwen3_5_sections(vocabulary), **_get_qwen_ids(tokenizer))


def _build_qwen3_5_moe_config(vocabulary: int, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    sections = _build_qwen3_5_sections(vocabulary)
    sections["text_config"] = {**sections["text_config"], **_EXPERTS, "shared_expert_intermediate_size": 32}
    return Qwen3_5MoeConfig(**sections, **_get_qwen_ids(tokenizer))


def _build_internvl_config(vocabulary: int, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    vision = InternVLVisionConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=[56, 56],
        patch_size=[14, 14],
    )
    text = Qwen2Config(**_TEXT, vocab_size=vocabulary, tie_word_embeddings=True)
    image = tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>")
    return InternVLConfig(vision_config=vision, text_config=text, image_token_id=image, image_seq_length=4)


def _build_llava_config(vocabulary: int, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    vision = CLIPVisionConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=56, patch_size=14
    )
    text = LlamaConfig(**_TEXT, vocab_size=vocabulary, tie_word_embeddings=True)
    image = tokenizer.convert_tokens_to_ids("<image>")
    return LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=image, image_seq_length=16, vision_feature_layer=-2
    )


def _build_gemma3_config(vocabulary: int, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    vision = SiglipVisionConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=56,
        patch_size=14,
        vision_use_head=False,
    )
    text = Gemma3TextConfig(**_TEXT, vocab_size=vocabulary, head_dim=8, sliding_window=64)
    start, end, soft = tokenizer.convert_tokens_to_ids(["<start_of_image>", "<end_of_image>", "<image_soft_token>"])
    return Gemma3Config(
        vision_config=vision,
        text_config=text,
        mm_tokens_per_image=4,
        boi_token_index=start,
        eoi_token_index=end,
        image_token_id=soft,
        image_token_index=soft,
    )


def _build_qwen_processor(**options: Any) -> Any:
    return Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64}, **options)


_SMALL = {"height": 56, "width": 56}
RECIPES: dict[str, ModelRecipe] = {
    "qwen2_vl": ModelRecipe(
        _QWEN_IMAGE, _QWEN_TOKENS, _build_qwen2_vl_config, _build_qwen_processor, (28 * 28, 28 * 28 * 8)
    ),
    "qwen2_5_vl": ModelRecipe(
        _QWEN_IMAGE, _QWEN_TOKENS, _build_qwen2_5_vl_config, _build_qwen_processor, (28 * 28, 28 * 28 * 8)
    ),
    **{
        model_type: ModelRecipe(
            _QWEN_IMAGE,
            _QWEN_TOKENS,
            build_config,
            lambda: _build_qwen_processor(patch_size=16),
            (32 * 32 * 2, 32 * 32 * 64),
        )
        for model_type, build_config in (
            ("qwen3_vl", _build_qwen3_vl_config),
            ("qwen3_vl_moe", _build_qwen3_vl_moe_config),
            ("qwen3_5", _build_qwen3_5_config),
            ("qwen3_5_moe", _build_qwen3_5_moe_config),
        )
    },
    "internvl": ModelRecipe(
        "<IMG_CONTEXT>\\n",
        ("<img>", "</img>", "<IMG_CONTEXT>"),
        _build_internvl_config,
        lambda: GotOcr2ImageProcessorPil(size=_SMALL, max_patches=4),
    ),
    "llava": ModelRecipe(
        "<image>\\n",
        ("<image>",),
        _build_llava_config,
        lambda: CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size=_SMALL),
    ),
    "gemma3": ModelRecipe(
        "<start_of_image>",
        ("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        _build_gemma3_config,
        lambda: Gemma3ImageProcessorPil(size=_SMALL),
    ),
}


VIDEO_MODEL_TYPES = tuple(model_type for model_type, recipe in RECIPES.items() if recipe.video_pixels)


def build_tokenizer(model_type: str) -> PreTrainedTokenizerFast:
    tokenizer = tiny_text.build_tokenizer()
    special_tokens = ("<|im_start|>", *RECIPES[model_type].special_tokens)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken(token, special=True) for token in special_tokens]}
    )
    tokenizer.chat_template = _render_template(RECIPES[model_type].image_placeholder)
    return tokenizer


def build(folder: Path, model_type: str = "qwen2_vl", *, seed: int = 0) -> Path:
    """Create a model, its tokenizer and its processors in a folder and return the folder."""
    tokenizer = build_tokenizer(model_type)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = RECIPES[model_type].build_config(len(tokenizer), tokenizer)
    model = AutoModelForImageTextToText.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() == 2 and not parameter.any():  # Gemma 3 initializes its aligner with zeros
            torch.nn.init.normal_(parameter, std=0.1)
    tiny_text.save_model(model, folder)
    RECIPES[model_type].processor().save_pretrained(folder)
    if pixels := RECIPES[model_type].video_pixels:
        size = dict(zip(("shortest_edge", "longest_edge"), pixels, strict=True))
        (folder / "video_preprocessor_config.json").write_text(json.dumps({"size": size}))
    return folder


def write_image(folder: Path, name: str, size: tuple[int, int], *, seed: int) -> str:
    """Write an image with random pixels and return its file name; `size` is (width, height)."""
    noise = torch.randint(0, 256, (size[1], size[0], 3), generator=torch.Generator().manual_seed(seed))
    Image.fromarray(noise.to(torch.uint8).numpy()).save(folder / name)
    return name


def write_video(folder: Path, name: str, size: tuple[int, int], *, frames: int, fps: int, seed: int = 0) -> str:
    """Write a video with one random colour per frame and return its file name; `size` is (width, height)."""
    import av  # only videos need it

    colours = torch.randint(0, 256, (frames, 3), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    with av.open(str(folder / name), "w") as file:
        stream = file.add_stream("mpeg4", rate=fps)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for colour in colours:
            frame = av.VideoFrame.from_ndarray(colour.expand(size[1], size[0], 3).contiguous().numpy(), format="rgb24")
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return name


def return_zero(_row_number: int) -> int:
    return 0


def write_rows(
    folder: Path,
    row_count: int,
    *,
    images: Callable[[int], int] = return_zero,
    videos: Callable[[int], int] = return_zero,
) -> Path:
    """Write chat rows with images and videos, and the same rows as preference pairs; return the path of the rows.

    `images` and `videos` return the number of images and videos for a row number.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, row in zip(range(row_count), tiny_text.generate_chat_rows(), strict=False):
        image_names = [
            write_image(
                folder, f"{number}-{index}.png", (28 + 28 * ((number + index) % 3), 56), seed=10 * number + index
            )
            for index in range(images(number))
        ]
        video_names = [
            write_video(folder, f"{number}-{index}.mp4", (56, 28), frames=8 + 2 * (number % 3), fps=4, seed=number)
            for index in range(videos(number))
        ]
        question, answer = row["messages"]
        placeholders = "<image>" * len(image_names) + "<video>" * len(video_names)
        question = {**question, "content": placeholders + question["content"]}
        media = {column: value for column, value in (("images", image_names), ("videos", video_names)) if value}
        rows.append({"messages": [question, {**answer, "content": answer["content"][:80]}], **media})
    path = folder / "rows.jsonl"
    tiny_text.write_jsonl(path, rows)
    tiny_text.write_jsonl(tiny_text.get_preferences_path(path), [tiny_text.convert_to_preference(row) for row in rows])
    return path
