"""LoRA adapters on a model, and what is said when a target matches nothing."""

import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import set_seed

from finetune_api.v1alpha1 import Lora
from finetune_trainer.errors import InvalidSpec

_ALL_LINEAR = "all-linear"


def add_adapters(model: torch.nn.Module, lora: Lora, *, seed: int, widen: bool = True) -> torch.nn.Module:
    """Adapters, the same on every rank: they are drawn from `seed`.

    They are widened to float32, except for DeepSpeed, which wants one type and keeps wide copies of its own.
    """
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=lora.r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=choose_targets(model, lora.target_modules),
    )
    set_seed(seed)
    try:
        return get_peft_model(model, config, autocast_adapter_dtype=widen)  # type: ignore[no-any-return]
    except ValueError as error:
        raise InvalidSpec(f"spec.lora.targetModules: {error}") from error


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
