"""What each family of vision-language models calls its parts, and how an image is written for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import BaseImageProcessor, PretrainedConfig, PreTrainedTokenizerBase

Size = tuple[int, int]  # height, width


@dataclass(frozen=True)
class Seen:
    """What a family's rules look at."""

    config: PretrainedConfig
    processor: BaseImageProcessor
    tokenizer: PreTrainedTokenizerBase

    def token(self, number: int) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(number))

    @property
    def image_token(self) -> str:
        """That one embedding of an image takes the place of."""
        return self.token(self.config.image_token_id)


@dataclass(frozen=True)
class Family:
    """One architecture. Names are prefixes of modules; what neither sees nor aligns is language."""

    vision: str
    aligner: tuple[str, ...]  # maybe inside of vision
    write: Callable[[Seen, Size], str]  # the text that an image of that size becomes
    placeholder: Callable[[Seen], str] = lambda seen: seen.image_token  # what the chat template writes for an image
    types: str | None = None  # the input that tells image tokens from others
    any_size: bool = False  # an image has as many tokens as its pixels ask for
    options: Mapping[str, Any] | None = None  # of the image processor
    unreached: Callable[[PretrainedConfig], str | None] = lambda _config: None  # a pattern: what no image runs through


def _qwen(seen: Seen, size: Size) -> str:
    patches = seen.processor.get_number_of_image_patches(*size, {})
    return seen.image_token * int(patches // seen.processor.merge_size**2)


def _internvl(seen: Seen, size: Size) -> str:
    tiles = seen.processor.get_number_of_image_patches(*size, {"crop_to_patches": True})
    start = getattr(seen.tokenizer, "start_image_token", "<img>")
    end = getattr(seen.tokenizer, "end_image_token", "</img>")
    return f"{start}{seen.image_token * (tiles * seen.config.image_seq_length)}{end}"


def _llava(seen: Seen, _size: Size) -> str:
    """Always the same: CLIP keeps its class token unless the default strategy drops it."""
    vision = seen.config.vision_config
    has_class_token = vision.model_type == "clip_vision_model"
    keeps_it = has_class_token and seen.config.vision_feature_select_strategy == "full"
    return seen.image_token * int((vision.image_size // vision.patch_size) ** 2 + keeps_it)


def _llava_unreached(config: PretrainedConfig) -> str:
    """Layers behind the last whose output is taken, which LLaVA 1.5's is not, and the norm of CLIP's summary."""
    layers, taken = config.vision_config.num_hidden_layers, config.vision_feature_layer
    last = max(layer if layer >= 0 else layers + 1 + layer for layer in ([taken] if isinstance(taken, int) else taken))
    behind = "|".join(str(layer) for layer in range(last, layers))
    names = ["post_layernorm", *([rf"layers\.(?:{behind})"] if behind else [])]
    return rf"model\.vision_tower\.(?:.*\.)?(?:{'|'.join(names)})(?=\.|$)"


def _gemma3(seen: Seen, _size: Size) -> str:
    start, end = (seen.token(number) for number in (seen.config.boi_token_index, seen.config.eoi_token_index))
    return f"\n\n{start}{seen.image_token * seen.config.mm_tokens_per_image}{end}\n\n"


def _qwen_vl(*aligner: str) -> Family:
    return Family("model.visual", aligner, _qwen, types="mm_token_type_ids", any_size=True)


_TOWER, _PROJECTOR = "model.vision_tower", ("model.multi_modal_projector",)

FAMILIES: dict[str, Family] = {  # by the config's model_type
    "qwen2_vl": _qwen_vl("model.visual.merger"),
    "qwen2_5_vl": _qwen_vl("model.visual.merger"),
    "qwen3_vl": _qwen_vl("model.visual.merger", "model.visual.deepstack_merger_list"),
    "internvl": Family(_TOWER, _PROJECTOR, _internvl, options={"crop_to_patches": True}),
    "llava": Family(_TOWER, _PROJECTOR, _llava, unreached=_llava_unreached),
    "gemma3": Family(
        _TOWER,
        _PROJECTOR,
        _gemma3,
        placeholder=lambda seen: seen.token(seen.config.boi_token_index),
        types="token_type_ids",
    ),
}
