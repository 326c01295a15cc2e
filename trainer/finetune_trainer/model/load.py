"""Loads tokenizer and model from a path or the Hub, in the dtype that training needs."""

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError
from torch.distributed import get_rank, is_initialized
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from finetune_api.v1alpha1.job import TrainerSpec
from finetune_api.v1alpha1.model_source import ModelSource
from finetune_trainer.errors import HubUnavailable, InvalidSpec, ModelError, ModelNotFound, first_line, iterate_causes
from finetune_trainer.foreign_files import copy_model_files
from finetune_trainer.model.attention_backend import SDPA
from finetune_trainer.model.lora import PICKLED, add_adapters, add_reference_adapter, record_base_model, trains_biases
from finetune_trainer.model.quantization import build_nf4_config, check_quantizable, disable_cpu_repacking
from finetune_trainer.model.supported_types import (
    check_needs_no_remote_code,
    check_router_loss,
    check_sizes,
    check_towers,
    find_frozen_modules,
)
from finetune_trainer.model.text_part import build_module_pattern, freeze_modules
from finetune_trainer.model.varlen_attention import VARLEN
from finetune_trainer.model.varlen_support import select_text_attention
from finetune_trainer.model.weight_loading import DEFAULT_LOADING, WeightLoading, load_on_rank_zero
from finetune_trainer.vision.freeze import freeze_groups, resolve_frozen_groups
from finetune_trainer.vision.processor import VisionProcessor, build_vision_processor
from finetune_trainer.vision.towers import build_on_meta, choose_auto_class

T = TypeVar("T")
_LISTED_TENSORS = 3  # in a log line


@dataclass(frozen=True)
class ModelDescription:
    """Config, tokenizer and vision processor of a model, which are loaded before its weights."""

    name: str
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    dtype: torch.dtype  # dtype of the published result; training may use float32
    local: ModelSource  # name and revision from which files are loaded: a checked copy in the pod, or the Hub
    vision: VisionProcessor | None = None  # None for text models, and for the text part of others
    frozen_modules: tuple[str, ...] = ()  # modules that text does not reach (spec.model.textOnly)
    attention: str = SDPA  # name of the attention implementation
    revision: str | None = None  # branch, tag or commit on the Hub; in training the commit, None for a path

    @property
    def attention_option(self) -> str | dict[str, str]:
        """Argument attn_implementation of transformers; varlen applies to the text part only."""
        return select_text_attention(self.config, VARLEN) if self.attention == VARLEN else self.attention

    @property
    def max_length(self) -> int | None:
        """Maximum number of tokens per sample, or None if the config does not define it."""
        return max_length(self.config)


def describe_model(source: ModelSource, device: torch.device, *, is_downloaded: bool = False) -> ModelDescription:
    """Load the config, tokenizer and vision processor of a model, but not its weights.

    is_downloaded: whether all files of a model on the Hub are in the cache.
    Raises: ModelNotFound, ModelError, HubUnavailable or InvalidSpec.
    """
    _check_path(source)
    folder = source.name if is_path(source.name) else None
    if is_downloaded and not folder:
        folder = load_or_raise(
            source, lambda: snapshot_download(source.name, revision=source.revision, local_files_only=True)
        )
    local = source
    if folder:
        files = copy_model_files(Path(folder), f'spec.model.name: model "{source.name}"')
        local = source.model_copy(update={"name": files, "revision": None})
    config = read_config(source, local)
    tokenizer = load_or_raise(source, lambda: AutoTokenizer.from_pretrained(local.name, revision=local.revision))
    vision = load_or_raise(source, lambda: build_vision_processor(source, config, tokenizer, local))
    frozen_modules = find_frozen_modules(source, config)
    dtype = choose_dtype(source, config, device)
    return ModelDescription(
        source.name, config, tokenizer, dtype, local, vision, frozen_modules, revision=source.revision
    )


def read_config(source: ModelSource, local: ModelSource | None = None) -> PretrainedConfig:
    """Read the model's config.json. Raises: ModelNotFound, ModelError, HubUnavailable or InvalidSpec.

    local: source with the name and revision from which files are loaded, by default those of `source`.
    """
    _check_path(source)
    location = local or source
    if local is None or is_path(local.name):  # otherwise, a program that reads from the Hub has checked it before
        content, _ = load_or_raise(
            source, lambda: PretrainedConfig.get_config_dict(location.name, revision=location.revision)
        )
        check_sizes(content)
    config = load_or_raise(source, lambda: _load_config(source, location))
    check_towers(source, config)
    return config


def _check_path(source: ModelSource) -> None:
    if is_path(source.name) and source.revision is not None:
        raise InvalidSpec(
            f'spec.model.revision: "{source.revision}" is set, but model "{source.name}" is a path, and only a model on'
            " the Hub has revisions; remove revision"
        )
    if is_path(source.name) and not (Path(source.name) / "config.json").is_file():
        problem = "has no config.json" if Path(source.name).is_dir() else "does not exist"
        raise ModelNotFound(
            f'spec.model.name: "{source.name}" {problem}; mount the volume that contains the model (spec.volumes) or'
            " correct the path"
        )


def _load_config(source: ModelSource, local: ModelSource) -> PretrainedConfig:
    try:
        config = AutoConfig.from_pretrained(local.name, revision=local.revision, trust_remote_code=False)
        # A name in the file may be that of a repository with kernels, which transformers would run.
        config._attn_implementation = config._experts_implementation = None
        return config
    except ValueError:  # transformers does not define the model type
        check_needs_no_remote_code(source, PretrainedConfig.get_config_dict(local.name, revision=local.revision)[0])
        raise


def max_length(config: PretrainedConfig) -> int | None:
    """Return the maximum number of tokens per sample (max_position_embeddings), or None if it is not defined."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return positions if isinstance(positions, int) else None


def choose_training_dtype(result_dtype: torch.dtype, *, lora: bool) -> torch.dtype:
    """Return the training dtype: float32 for full tuning, because 16-bit weights would round most updates to zero."""
    return result_dtype if lora else torch.float32


def load_model(
    spec: TrainerSpec, model_description: ModelDescription, loading: WeightLoading = DEFAULT_LOADING
) -> torch.nn.Module:
    """Load the model to train, freeze its parameter groups and add adapters as specified."""
    check_router_loss(spec, model_description.config)
    quantize = spec.lora is not None and spec.lora.quantization is not None
    dtype = choose_training_dtype(model_description.dtype, lora=spec.lora is not None)
    model = load_weights(model_description, dtype, loading, quantize=quantize)
    freeze_modules(model, model_description.frozen_modules)
    exclude_modules = build_module_pattern(model_description.frozen_modules)
    if model_description.vision:
        exclude_modules = freeze_groups(model, model_description.vision, resolve_frozen_groups(spec.model.freeze))
    if spec.lora is None:
        return model
    upcast_adapters = spec.deepspeed is None
    adapted = add_adapters(
        model, spec.lora, seed=spec.training.seed, upcast_adapters=upcast_adapters, exclude_modules=exclude_modules
    )
    previous = record_base_model(adapted, spec.model.name, model_description.revision)
    if previous != spec.model.name and spec.lora.adapter and not (is_initialized() and get_rank()):
        print(f'warning: the adapter was trained on "{previous}"; it is continued on "{spec.model.name}"', flush=True)
    if spec.dpo and spec.lora.adapter and not trains_biases(adapted):
        add_reference_adapter(adapted, spec.lora.adapter, upcast_adapters=upcast_adapters)
    return adapted


def load_reference_model(
    spec: TrainerSpec, model_description: ModelDescription, loading: WeightLoading
) -> torch.nn.Module:
    """Load a frozen copy of the original model, with its adapter if it has one, as the reference model for DPO."""
    if spec.lora is not None:
        model = load_model(spec.model_copy(update={"dpo": None}), model_description, loading)
    else:
        model = load_weights(model_description, choose_reference_dtype(spec, model_description.dtype), loading)
    return model.requires_grad_(requires_grad=False)


def choose_reference_dtype(spec: TrainerSpec, result_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which DPO's reference model for full tuning is loaded: that in which the policy computes.

    FSDP2 and DeepSpeed compute in the result's dtype. Otherwise, and with FSDP2 on one rank, a float32 policy computes
    under autocast.
    """
    is_sharded = spec.deepspeed is not None or (spec.fsdp is not None and spec.world_size > 1)
    return result_dtype if is_sharded else torch.float32


def load_weights(
    model_description: ModelDescription,
    dtype: torch.dtype,
    loading: WeightLoading = DEFAULT_LOADING,
    *,
    quantize: bool = False,
) -> torch.nn.Module:
    """Load the model without adapters, optionally quantized to 4 bits; collective if only rank 0 loads.

    Raises: ModelNotFound, ModelError, HubUnavailable or InvalidSpec.
    """
    if loading.rank_zero_only:
        model: torch.nn.Module = load_on_rank_zero(
            lambda: _read_weights(model_description, dtype, loading.device, quantize=quantize),
            lambda: build_on_meta(
                model_description.config, dtype=dtype, attn_implementation=model_description.attention_option
            ),
        )
        return model
    return _read_weights(model_description, dtype, loading.device, quantize=quantize)


def _read_weights(
    model_description: ModelDescription, dtype: torch.dtype, device: torch.device | None, *, quantize: bool
) -> torch.nn.Module:
    """Read the weights directly to the device. device: None for the choice of transformers."""
    auto_class = choose_auto_class(model_description.config)
    options: dict[str, Any] = {} if device is None else {"device_map": {"": device}}
    if quantize:
        check_quantizable(model_description.name, model_description.config)
        family = model_description.vision.family if model_description.vision else None
        options["quantization_config"] = build_nf4_config(
            model_description.dtype, family, unquantized_modules=model_description.frozen_modules
        )
    local = model_description.local
    model: torch.nn.Module
    model, found = load_or_raise(
        model_description,
        lambda: auto_class.from_pretrained(
            local.name,
            revision=local.revision,
            config=model_description.config,
            dtype=dtype,
            attn_implementation=model_description.attention_option,
            output_loading_info=True,
            **options,
        ),
    )
    _check_tensors(model_description.name, found)
    disable_cpu_repacking(model)
    return model


def _check_tensors(name: str, found: Mapping[str, Collection[Any]]) -> None:
    """Raise ModelError for missing tensors, for which transformers would use random values; log unexpected ones."""
    if missing := sorted(found["missing_keys"]):
        raise ModelError(
            f'model "{name}" lacks {len(missing)} tensors of its architecture, such as {missing[0]}; download it again,'
            " or correct architectures or model_type in its config.json"
        )
    if unexpected := sorted(found["unexpected_keys"]):
        names = ", ".join(unexpected[:_LISTED_TENSORS])
        print(f"model: {len(unexpected)} tensors of the files are not used: {names}", flush=True)


def get_pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of the pad or EOS token, or 0. Any id is valid, because padding is masked."""
    for candidate in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if candidate is not None:
            return int(candidate)
    return 0


def is_path(name: str) -> bool:
    """Return whether the model is a path instead of a name on the Hub."""
    return name.startswith(("/", ".")) or Path(name).exists()


def load_or_raise(model: ModelSource | ModelDescription, load_function: Callable[[], T]) -> T:
    """Call `load_function` and translate its exceptions into ModelNotFound, ModelError or HubUnavailable."""
    try:
        return load_function()
    except UnpicklingError as error:
        raise ModelError(f'model "{model.name}" {PICKLED}') from error
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        name, chain = model.name, tuple(iterate_causes(error))
        if any(isinstance(cause, GatedRepoError) for cause in chain):
            raise ModelNotFound(
                f'spec.model.name: access to "{name}" is gated; accept its terms on the Hub and set HF_TOKEN from a'
                " Secret in spec.env"
            ) from error
        if any(isinstance(cause, RevisionNotFoundError) for cause in chain):
            raise ModelNotFound(
                f'spec.model.revision: "{model.revision}" is no branch, tag or commit of model "{name}" on the Hub;'
                " correct it"
            ) from error
        if any(_is_missing(cause) for cause in chain):
            raise ModelNotFound(
                f'spec.model.name: "{name}" is neither a path nor a model on the Hub that this job may read; correct'
                " the name, or set HF_TOKEN from a Secret in spec.env if it is private"
            ) from error
        if isinstance(error, OSError) and not is_path(name):
            raise HubUnavailable(f'"{name}" could not be read from the Hub: {first_line(error)}') from error
        cause = _describe_unreadable_file(Path(name)) or first_line(error)
        raise ModelError(f'model "{name}" cannot be loaded for text generation: {cause}') from error


def _is_missing(error: BaseException) -> bool:
    """Return whether the Hub has no such model or file; files that are only missing in the local cache do not count."""
    missing = isinstance(error, RepositoryNotFoundError | EntryNotFoundError | HFValidationError)
    return missing and not isinstance(error, LocalEntryNotFoundError)


def _describe_unreadable_file(folder: Path) -> str | None:
    """Return a description of the first unreadable file of a local model, or None if all files are readable.

    safetensors saves weights with mode 0600 and reports an unreadable file as missing.
    """
    for path in sorted(folder.glob("*")):
        if path.is_file() and not os.access(path, os.R_OK):
            mode = f"{path.stat().st_mode & 0o777:04o}"
            return f"user id {os.getuid()} may not read {path.name} (mode {mode}); run chmod -R a+rX on the folder"
    return None


def choose_dtype(source: ModelSource, config: PretrainedConfig, device: torch.device) -> torch.dtype:
    """Return the dtype in the spec, or the dtype of the checkpoint for `auto`.

    Raises: InvalidSpec if the dtype cannot be trained on the device.
    """
    dtype: torch.dtype | None
    if source.torch_dtype == "auto":
        dtype = getattr(config, "dtype", None) or torch.float32
    else:
        dtype = getattr(torch, source.torch_dtype)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise InvalidSpec(
            f"spec.model.torchDtype: the model's dtype {dtype} cannot be trained; set float32, bfloat16 or float16"
        )
    if dtype is torch.float16 and device.type == "cpu":
        raise InvalidSpec(
            f"spec.model.torchDtype: {_describe_dtype_origin(source)} float16, which needs a GPU; on CPU set float32 or"
            " bfloat16"
        )
    if dtype is torch.bfloat16 and device.type == "cuda" and not has_native_bf16():
        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        raise InvalidSpec(
            f"spec.model.torchDtype: {_describe_dtype_origin(source)} bfloat16, which {name} (compute capability"
            f" {capability[0]}.{capability[1]}) only emulates; set float16, or float32"
        )
    return dtype


def has_native_bf16() -> bool:
    """Return whether the GPU supports bfloat16 natively; transformers also accepts emulated support."""
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def _describe_dtype_origin(source: ModelSource) -> str:
    return "auto resolves to" if source.torch_dtype == "auto" else "is"
