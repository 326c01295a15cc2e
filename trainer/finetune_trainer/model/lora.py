"""LoRA adapters on a model, and what is said when a target matches nothing."""

from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, TaskType, get_peft_model
from transformers import set_seed

from finetune_api.v1alpha1.lora import Lora
from finetune_trainer.errors import InvalidSpec, ModelError, ModelNotFound, first_line

TRAINED = "default"  # peft's own name
REFERENCE = "reference"  # the name of the copy of an adapter that is gone on from
_ALL_LINEAR = "all-linear"


def add_adapters(
    model: torch.nn.Module, lora: Lora, *, seed: int, widen: bool = True, without: str | None = None
) -> torch.nn.Module:
    """Adapters, the same on every rank: they are drawn from `seed`. Modules whose names match `without` get none.

    They are widened to float32, except for DeepSpeed, which wants one type and keeps wide copies of its own.
    """
    if lora.adapter is not None:
        return _go_on_from(model, lora, lora.adapter, widen=widen)
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=lora.r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=choose_targets(model, lora.target_modules),
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        exclude_modules=without,
    )
    set_seed(seed)
    try:
        return get_peft_model(model, config, autocast_adapter_dtype=widen)  # type: ignore[no-any-return]
    except ValueError as error:
        raise InvalidSpec(f"spec.lora.targetModules: {error}") from error


def shape_of(lora: Lora) -> Lora:
    """The same with the shape of the adapter that is gone on from, if there is one. Raises as `add_adapters` does."""
    if lora.adapter is None:
        return lora
    config = _read_config(lora.adapter)
    targets = config.target_modules or ()
    shape = {
        "adapter": None,
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "target_modules": (targets,) if isinstance(targets, str) else tuple(sorted(targets)),
        "use_rslora": config.use_rslora,
        "use_dora": config.use_dora,
    }
    return lora.model_copy(update=shape)


def _go_on_from(model: torch.nn.Module, lora: Lora, adapter: str, *, widen: bool) -> torch.nn.Module:
    """The adapter as it is, to be trained further."""
    config = _read_config(adapter)
    config.lora_dropout = lora.lora_dropout
    try:
        found = PeftModel.from_pretrained(
            model, adapter, is_trainable=True, config=config, autocast_adapter_dtype=widen
        )
    except (ValueError, RuntimeError, KeyError, OSError) as error:
        raise ModelError(
            f'spec.lora.adapter: "{adapter}" does not fit the model ({first_line(error)}); it was trained from'
            f" {config.base_model_name_or_path or 'another one'}"
        ) from error
    trained: torch.nn.Module = found
    return trained


def keep_reference(model: Any, adapter: str, *, widen: bool = True) -> None:
    """A copy of the adapter that stays as it is, beside the one that is trained: what DPO compares with."""
    model.load_adapter(adapter, REFERENCE, is_trainable=False, autocast_adapter_dtype=widen)


def _read_config(adapter: str) -> LoraConfig:
    try:
        config = PeftConfig.from_pretrained(adapter)
    except (ValueError, OSError) as error:
        raise ModelNotFound(
            f'spec.lora.adapter: "{adapter}" is no folder with an adapter_config.json and no adapter on the Hub that'
            " this job may read; correct the path, or mount the volume that holds it (spec.volumes)"
        ) from error
    if not isinstance(config, LoraConfig):
        raise ModelError(
            f'spec.lora.adapter: "{adapter}" is a {config.peft_type} adapter; only LoRA can be trained further'
        )
    return config


def choose_targets(model: torch.nn.Module, wanted: tuple[str, ...]) -> str | list[str]:
    """As peft takes them. Raises InvalidSpec, naming the candidates, if one of them matches no module."""
    if wanted == (_ALL_LINEAR,):
        return _ALL_LINEAR
    if _ALL_LINEAR in wanted:
        raise InvalidSpec("spec.lora.targetModules: all-linear includes every other target; give it alone")
    names = [name for name, _ in model.named_modules()]
    for target in wanted:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise InvalidSpec(
                f"spec.lora.targetModules: {target} matches no module of the model; its linear layers are"
                f" {', '.join(_linear_names(model))}, or use all-linear"
            )
    return list(wanted)


def _linear_names(model: torch.nn.Module) -> list[str]:
    """Last parts of the names, which is what people write."""
    linear = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    return sorted({name.rpartition(".")[2] for name in linear} - {"lm_head"})
