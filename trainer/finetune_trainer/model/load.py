"""The tokenizer and the model, from a path or the Hub, in the data type that suits how it is trained."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from finetune_api.v1alpha1.job import TrainerSpec
from finetune_api.v1alpha1.model_source import ModelSource
from finetune_trainer.errors import HubUnavailable, InvalidSpec, ModelError, ModelNotFound, causes, first_line
from finetune_trainer.model.attention_backend import SDPA
from finetune_trainer.model.lora import add_adapters, keep_reference
from finetune_trainer.model.quantization import four_bit, keep_as_quantized
from finetune_trainer.vision.freeze import freeze_as_asked, frozen_groups
from finetune_trainer.vision.processor import Vision, describe_vision

T = TypeVar("T")


@dataclass(frozen=True)
class Pretrained:
    """What can be known of a model before its weights are read."""

    name: str
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    dtype: torch.dtype  # of the result; training may keep its weights in more bits
    vision: Vision | None = None  # of a model that sees
    attention: str = SDPA  # the name of its implementation

    @property
    def max_length(self) -> int | None:
        return max_length(self.config)


def describe_model(source: ModelSource, device: torch.device) -> Pretrained:
    """Raises ModelNotFound, ModelError or InvalidSpec, before anything large is read."""
    config = read_config(source)
    tokenizer = _fetch(source.name, lambda: AutoTokenizer.from_pretrained(source.name))
    vision = _fetch(source.name, lambda: describe_vision(source, config, tokenizer))
    return Pretrained(source.name, config, tokenizer, choose_dtype(source, config, device), vision)


def read_config(source: ModelSource) -> PretrainedConfig:
    """Raises ModelNotFound or ModelError."""
    if _is_path(source.name) and not (Path(source.name) / "config.json").is_file():
        found = "has no config.json" if Path(source.name).is_dir() else "does not exist"
        raise ModelNotFound(
            f'spec.model.name: "{source.name}" {found}; mount the volume that holds the model (spec.volumes) or correct'
            " the path"
        )
    return _fetch(source.name, lambda: AutoConfig.from_pretrained(source.name))


def max_length(config: PretrainedConfig) -> int | None:
    """Tokens that the model has positions for."""
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) else None


def training_dtype(result: torch.dtype, *, lora: bool) -> torch.dtype:
    """Of the weights. Full tuning keeps float32: in 16 bits most updates would round to nothing."""
    return result if lora else torch.float32


def load_model(spec: TrainerSpec, pretrained: Pretrained) -> torch.nn.Module:
    """The model to train."""
    four_bits = spec.lora is not None and spec.lora.quantization is not None
    model = load_weights(pretrained, training_dtype(pretrained.dtype, lora=spec.lora is not None), four_bits=four_bits)
    without = None
    if pretrained.vision:
        without = freeze_as_asked(model, pretrained.vision, frozen_groups(spec.model.freeze))
    if spec.lora is None:
        return model
    widen = spec.deepspeed is None
    adapted = add_adapters(model, spec.lora, seed=spec.training.seed, widen=widen, without=without)
    if spec.dpo and spec.lora.adapter:
        keep_reference(adapted, spec.lora.adapter, widen=widen)
    return adapted


def load_reference(pretrained: Pretrained) -> torch.nn.Module:
    """The model as it was, frozen: what full tuning by DPO is compared with."""
    return load_weights(pretrained, pretrained.dtype).requires_grad_(requires_grad=False)


def load_weights(pretrained: Pretrained, dtype: torch.dtype, *, four_bits: bool = False) -> torch.nn.Module:
    kind = AutoModelForImageTextToText if pretrained.vision else AutoModelForCausalLM
    family = pretrained.vision.family if pretrained.vision else None
    options = {"quantization_config": four_bit(pretrained.dtype, family)} if four_bits else {}
    model: torch.nn.Module = _fetch(
        pretrained.name,
        lambda: kind.from_pretrained(
            pretrained.name,
            config=pretrained.config,
            dtype=dtype,
            attn_implementation=pretrained.attention,
            **options,
        ),
    )
    keep_as_quantized(model)
    return model


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Any id will do: padding is masked."""
    for candidate in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if candidate is not None:
            return int(candidate)
    return 0


def _is_path(name: str) -> bool:
    return name.startswith(("/", ".")) or Path(name).exists()


def _fetch(name: str, load: Callable[[], T]) -> T:
    """Read from disk or the Hub, with the library's many errors told apart by who can act."""
    try:
        return load()
    except (OSError, ValueError, KeyError) as error:
        chain = tuple(causes(error))
        if any(isinstance(cause, GatedRepoError) for cause in chain):
            raise ModelNotFound(
                f'spec.model.name: access to "{name}" is gated; accept its terms on the Hub and give HF_TOKEN from a'
                " Secret in spec.env"
            ) from error
        if any(isinstance(cause, RepositoryNotFoundError | EntryNotFoundError) for cause in chain):
            raise ModelNotFound(
                f'spec.model.name: "{name}" is no path and no model on the Hub that this job may read; correct the'
                " name, or give HF_TOKEN from a Secret in spec.env if it is private"
            ) from error
        if isinstance(error, OSError) and not _is_path(name):
            raise HubUnavailable(f'the Hub could not give "{name}": {first_line(error)}') from error
        raise ModelError(f'model "{name}" cannot be loaded for text generation: {first_line(error)}') from error


def choose_dtype(source: ModelSource, config: PretrainedConfig, device: torch.device) -> torch.dtype:
    """What the spec asks for, or what the checkpoint is in. Raises InvalidSpec if the device does not compute in it."""
    dtype: torch.dtype | None
    if source.torch_dtype == "auto":
        dtype = getattr(config, "dtype", None) or torch.float32
    else:
        dtype = getattr(torch, source.torch_dtype)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise InvalidSpec(
            f"spec.model.torchDtype: the model's own type {dtype} cannot be trained; set one of the others"
        )
    if dtype is torch.float16 and device.type == "cpu":
        raise InvalidSpec(
            f"spec.model.torchDtype: {_asked(source)} float16, which needs a GPU; on CPU set float32 or bfloat16"
        )
    if dtype is torch.bfloat16 and device.type == "cuda" and not has_native_bf16():
        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        raise InvalidSpec(
            f"spec.model.torchDtype: {_asked(source)} bfloat16, which {name} (compute capability"
            f" {capability[0]}.{capability[1]}) only emulates; set float16, or float32"
        )
    return dtype


def has_native_bf16() -> bool:
    """transformers asks with emulation allowed and lets slow GPUs pass."""
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def _asked(source: ModelSource) -> str:
    return "auto found" if source.torch_dtype == "auto" else "asks for"
