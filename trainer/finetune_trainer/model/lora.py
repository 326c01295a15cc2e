"""Adds new LoRA adapters or the adapter of an earlier job to a model, and validates target modules."""

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub import snapshot_download
from peft import LoraConfig, PeftConfig, PeftModelForCausalLM, TaskType, get_peft_model
from peft.tuners.lora.layer import LoraLayer, LoraVariant
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from peft.utils.other import AuxiliaryTrainingWrapper
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from transformers import set_seed

from finetune_api.v1alpha1.lora import Lora
from finetune_trainer.cpu_limit import limit_cpu_seconds
from finetune_trainer.errors import InvalidSpec, ModelError, ModelNotFound, first_line
from finetune_trainer.foreign_files import copy_model_files
from finetune_trainer.model.text_part import build_module_pattern
from finetune_trainer.once_per_job import check_hub_cache

TRAINED_ADAPTER = "default"  # peft's default adapter name
REFERENCE_ADAPTER = "reference"  # name of the frozen copy of an adapter that is trained further
PICKLED = "has pickled weights with other content than tensors, which could run code; convert them to safetensors"
_ALL_LINEAR = "all-linear"
# Submodules of a mixture-of-experts block that choose or weight the experts of a token
_ROUTER_NAMES = ("gate", "router", "shared_expert_gate")
_MATCH_SECONDS = 10
# A name, or the end of names as peft writes it for fused experts, which takes linear time to match
_NAME = re.compile(rf"(\.\*\\\.)?(\w|\\?\.)+|{_ALL_LINEAR}")
_PATTERN_FIELDS = ("target_modules", "exclude_modules")
_NAME_FIELDS = ("modules_to_save", "layers_pattern", "rank_pattern", "alpha_pattern")  # peft accepts patterns here, too


class _EarlyScaling(LoraVariant):  # type: ignore[misc]
    """LoRA whose scaling factor multiplies the r values of a token instead of its outputs, which are far more.

    Like all variants, it is used by the layers of peft in place of their own update.
    """

    merge_unsafe = staticmethod(LoraVariant.merge_safe)  # raises an error; that of peft changes nothing

    @staticmethod
    def forward(module: Any, active_adapter: str, x: torch.Tensor, result: torch.Tensor, **_: Any) -> torch.Tensor:
        """Return the output of the layer: `result` of the base layer plus the update, (..., out_features)."""
        reduced = module.lora_A[active_adapter](module.lora_dropout[active_adapter](x))
        update: torch.Tensor = module.lora_B[active_adapter](reduced * module.scaling[active_adapter])
        return result + update


def add_adapters(
    model: torch.nn.Module, lora: Lora, *, seed: int, upcast_adapters: bool = True, exclude_modules: str | None = None
) -> torch.nn.Module:
    """Add adapters to the model and return the model; `seed` makes the initial values equal on all ranks.

    upcast_adapters: whether adapters are float32; False for DeepSpeed, which requires a single dtype and keeps its own
    float32 copies.
    exclude_modules: regex for modules that get no adapters. all-linear also excludes the routers of experts.
    Raises: InvalidSpec, ModelNotFound or ModelError.
    """
    if lora.adapter is not None:
        return _continue_adapter(model, lora, lora.adapter, upcast_adapters=upcast_adapters)
    targets = choose_target_modules(model, lora.target_modules)
    if targets == _ALL_LINEAR:
        exclude_modules = _exclude_routers(model, exclude_modules)
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=lora.r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=targets,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        exclude_modules=exclude_modules,
    )
    _exclude_fused_parameters(config, model)
    set_seed(seed)
    try:
        adapted: torch.nn.Module = get_peft_model(model, config, autocast_adapter_dtype=upcast_adapters)
    except ValueError as error:
        raise InvalidSpec(f"spec.lora.targetModules: {error}") from error
    _check_merge(adapted, lora)
    _prepare_layers(adapted)
    return adapted


def add_unloaded_adapters(model: torch.nn.Module, lora: Lora, *, exclude_modules: str | None = None) -> torch.nn.Module:
    """Add adapters with the shapes of the trained ones, without loading the values of an adapter to continue.

    exclude_modules: as in `add_adapters`. Raises: InvalidSpec, ModelNotFound or ModelError.
    """
    if lora.adapter is None:
        return add_adapters(model, lora, seed=0, exclude_modules=exclude_modules)
    _, config = _read_adapter(lora.adapter, model)
    config.inference_mode = False  # otherwise, the adapters are frozen
    adapted: torch.nn.Module = get_peft_model(model, config)
    _check_merge(adapted, lora)
    _prepare_layers(adapted)
    return adapted


def _continue_adapter(model: torch.nn.Module, lora: Lora, adapter: str, *, upcast_adapters: bool) -> torch.nn.Module:
    """Load an existing adapter as a trainable adapter."""
    files, config = _read_adapter(adapter, model)
    config.lora_dropout = lora.lora_dropout
    subject = f'spec.lora.adapter: "{adapter}"'
    try:
        adapted = wrap_with_adapter(model, files, config, is_trainable=True, upcast=upcast_adapters)
    except UnpicklingError as error:
        raise ModelError(f"{subject} {PICKLED}") from error
    except (ValueError, RuntimeError, KeyError, OSError) as error:
        raise ModelError(
            f"{subject} does not fit the model ({first_line(error)}); its base model is"
            f" {config.base_model_name_or_path or 'another one'}"
        ) from error
    _check_merge(adapted, lora)
    _prepare_layers(adapted)
    return adapted


def wrap_with_adapter(
    model: torch.nn.Module, files: str | Path, config: LoraConfig, *, is_trainable: bool = False, upcast: bool = True
) -> torch.nn.Module:
    """Return the model with the adapter of a folder. upcast: as `upcast_adapters` of `add_adapters`.

    Raises: ValueError if a tensor is missing or unexpected, for which peft only warns; other errors of peft.
    """
    config.inference_mode = not is_trainable
    adapted: torch.nn.Module = PeftModelForCausalLM(model, config, TRAINED_ADAPTER, autocast_adapter_dtype=upcast)
    _load_tensors(adapted, files, TRAINED_ADAPTER, is_trainable=is_trainable, upcast=upcast)
    return adapted


def _load_tensors(model: Any, files: str | Path, name: str, *, is_trainable: bool, upcast: bool) -> None:
    with _gather_biases(model):
        found = model.load_adapter(files, name, is_trainable=is_trainable, autocast_adapter_dtype=upcast)
    for problem, keys in (("has no", found.missing_keys), ("has an unexpected", found.unexpected_keys)):
        if keys:
            raise ValueError(f"it {problem} tensor {min(keys)}" + (f" and {len(keys) - 1} more" if keys[1:] else ""))


def _gather_biases(model: torch.nn.Module) -> AbstractContextManager[object]:
    """Return a context in which the biases of the model, which an adapter may contain, are whole under ZeRO-3."""
    sharded = [each for name, each in model.named_parameters() if name.endswith("bias") and hasattr(each, "ds_id")]
    if not sharded:
        return nullcontext()
    from deepspeed.runtime.zero import GatheredParameters  # ZeRO-3 has imported it

    gathered: AbstractContextManager[object] = GatheredParameters(sharded, modifier_rank=0)
    return gathered


def _check_merge(model: Any, lora: Lora) -> None:
    """Raise InvalidSpec if the adapter changes one of two layers that share a weight, and is to be merged."""
    base = model.get_base_model()
    ends = (base.get_input_embeddings(), base.get_output_embeddings())
    weights = {
        id(getattr(getattr(end, "base_layer", getattr(end, "original_module", end)), "weight", end)) for end in ends
    }
    if (
        lora.merge
        and len(weights) == 1
        and any(isinstance(end, BaseTunerLayer | AuxiliaryTrainingWrapper) for end in ends)
    ):
        raise InvalidSpec(
            "spec.lora.merge: the adapter changes the output layer or the embeddings, which share their weight in this"
            " model, so that no merged model has its results; leave merge out, or remove lm_head and embed_tokens from"
            " the targets"
        )


def _prepare_layers(model: torch.nn.Module) -> None:
    """Make the layers with adapters faster, with the same results."""
    set_input_casts(model, enabled=False)
    for module in model.modules():
        if isinstance(module, LoraLayer) and isinstance(module.get_base_layer(), torch.nn.Linear):
            for adapter in module.lora_A.keys() - module.lora_variant.keys():
                module.lora_variant[adapter] = _EarlyScaling()


def set_input_casts(model: torch.nn.Module, *, enabled: bool) -> None:
    """Set whether peft casts the input of each adapter to the dtype of the adapter.

    If weights are in 16 bits and adapters in float32, training always uses autocast, which would cast the inputs back.
    Without these casts, the results are the same, and the backward pass needs no float32 copy of the inputs.
    """
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.cast_input_dtype_enabled = enabled


def add_reference_adapter(model: Any, adapter: str, *, upcast_adapters: bool = True) -> None:
    """Load a frozen copy of the adapter as the reference model for DPO."""
    files, _ = _read_adapter(adapter, model.get_base_model())
    _load_tensors(model, files, REFERENCE_ADAPTER, is_trainable=False, upcast=upcast_adapters)
    _prepare_layers(model)


def trains_biases(model: Any) -> bool:
    """Return whether the adapter trains biases of the model, for which peft supports no second adapter."""
    return bool(model.peft_config[TRAINED_ADAPTER].bias != "none")


def record_base_model(model: Any, name: str, commit: str | None) -> str:
    """Record the name of the base model and its commit in the config of the trained adapter, which is saved.

    Return the name that the config contained: for a continued adapter, that of the model on which it was trained.
    """
    config = model.peft_config[TRAINED_ADAPTER]
    previous = str(config.base_model_name_or_path or name)
    config.base_model_name_or_path, config.revision = name, commit
    return previous


def _read_adapter(adapter: str, model: torch.nn.Module) -> tuple[str, LoraConfig]:
    """Return a folder with a checked copy of an adapter, and its config, which has no patterns.

    adapter: a folder or a name on the Hub. Raises: ModelNotFound or ModelError.
    """
    subject = f'spec.lora.adapter: "{adapter}"'
    try:
        check_hub_cache(adapter)
        folder = adapter if Path(adapter).is_dir() else snapshot_download(adapter, allow_patterns="adapter_*")
        files = copy_model_files(Path(folder), subject)
        config = PeftConfig.from_pretrained(files)
    except (ValueError, OSError) as error:
        raise ModelNotFound(
            f"{subject} is neither a folder with an adapter_config.json nor an adapter on the Hub that this job may"
            " read; correct the path, or mount the volume that contains it (spec.volumes)"
        ) from error
    if not isinstance(config, LoraConfig):
        raise ModelError(f"{subject} is a {config.peft_type} adapter; only LoRA adapters can be continued")
    _replace_patterns(config, model, subject)
    config.save_pretrained(files)
    return files, config


def _replace_patterns(config: LoraConfig, model: torch.nn.Module, subject: str) -> None:
    """Replace patterns, which may take a time without end, by the names that they match. Raises: ModelError."""
    fields = [field for field in (*_NAME_FIELDS, *_PATTERN_FIELDS) if _has_pattern(getattr(config, field))]
    if not fields:
        return
    problem = f"{subject}, {' and '.join(fields)}: {str(getattr(config, fields[0]))[:200]!r}"
    too_slow = ModelError(f"{problem} cannot be matched within {_MATCH_SECONDS} s; replace it by a list of names")
    try:
        with limit_cpu_seconds(_MATCH_SECONDS, too_slow):
            if fields[0] in _NAME_FIELDS:
                raise TypeError("only names are supported")
            convert_peft_config_for_transformers(config, model, None)  # resolves names of experts that the model lacks
            modules = [name for name, _ in model.named_modules()]
            if config.target_modules is not None:
                config.target_modules = [name for name in modules if check_target_module_exists(config, name)]
            config.exclude_modules = config.layers_pattern = config.layers_to_transform = None
    except (re.error, ArithmeticError, RuntimeError, TypeError) as error:
        raise ModelError(f"{problem} cannot be used ({first_line(error)}); replace it by a list of names") from error


def _has_pattern(value: Any) -> bool:
    keys = [value] if isinstance(value, str) else map(str, value or ())
    return not all(_NAME.fullmatch(key) for key in keys)


def choose_target_modules(model: torch.nn.Module, requested_targets: tuple[str, ...]) -> str | list[str]:
    """Return `target_modules` for peft. Raises: InvalidSpec if a target matches no module."""
    if requested_targets == (_ALL_LINEAR,):
        return _ALL_LINEAR
    if _ALL_LINEAR in requested_targets:
        raise InvalidSpec("spec.lora.targetModules: all-linear includes every other target; set it alone")
    names = [name for name, _ in model.named_modules()]
    for target in requested_targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise InvalidSpec(
                f"spec.lora.targetModules: {target} matches no module of the model; its linear layers are"
                f" {', '.join(_find_linear_names(model))}, or use all-linear"
            )
    return list(requested_targets)


def find_routers(model: torch.nn.Module) -> Iterator[str]:
    """Yield the names of the modules that route tokens to experts, which are children of the experts' parent."""
    for name, module in model.named_modules():
        children = dict(module.named_children())
        if "experts" not in children:
            continue
        for child_name, child in children.items():
            if child_name in _ROUTER_NAMES or "Router" in type(child).__name__:
                yield f"{name}.{child_name}"


def _exclude_routers(model: torch.nn.Module, exclude_modules: str | None) -> str | None:
    """Add the routers of experts to the regex, because adapters there would change which experts are used."""
    routers = build_module_pattern(tuple(find_routers(model)))
    return "|".join(pattern for pattern in (exclude_modules, routers) if pattern) or None


def _exclude_fused_parameters(config: LoraConfig, model: torch.nn.Module) -> None:
    """Apply `exclude_modules` to the fused weights of routers and experts, for which peft ignores it.

    For some types, peft replaces the names of expert layers in `target_modules` by `target_parameters`. Converting the
    config here makes the later conversion of peft a no-op.
    """
    convert_peft_config_for_transformers(config, model, None)
    if config.target_parameters and config.exclude_modules:
        config.target_parameters = {
            target for target in config.target_parameters if not _is_excluded(target, config.exclude_modules, model)
        }


def _is_excluded(target: str, exclude_modules: str, model: torch.nn.Module) -> bool:
    """Return whether all parameters with this name suffix are in excluded modules."""
    owners = [name.rpartition(".")[0] for name, _ in model.named_parameters() if name.endswith(f".{target}")]
    return all(re.fullmatch(exclude_modules, owner) for owner in owners)


def _find_linear_names(model: torch.nn.Module) -> list[str]:
    """Return the last name components of the linear layers, such as q_proj."""

    linear = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    return sorted({name.rpartition(".")[2] for name in linear} - {"lm_head"})
