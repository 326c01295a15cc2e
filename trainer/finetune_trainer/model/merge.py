"""Merges an adapter into the weights of its base model, and verifies the merged files before they are published."""

from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.constants import SAFETENSORS_WEIGHTS_NAME
from peft.utils.other import AuxiliaryTrainingWrapper
from safetensors import safe_open
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from finetune_trainer.errors import ModelError
from finetune_trainer.model.load import ModelDescription, load_weights
from finetune_trainer.model.lora import TRAINED_ADAPTER, wrap_with_adapter
from finetune_trainer.model.save import save_tokenizer_and_processors

_PREFIX = "base_model.model."  # of the names of modules in a model of peft


def write_merged_model(
    model_description: ModelDescription, adapter: Path, folder: Path, *, report_progress: Callable[[], None]
) -> None:
    """Save the merged model, its tokenizer and its processor to `folder`, and load it again to verify each tensor.

    Called on one rank only. Reloads the base model into host memory, because the trained model may be sharded.
    Raises: ModelError if a tensor differs from that of the base model, or from its sum with the update of the adapter.
    """
    unset_hf_deepspeed_config()  # ZeRO-3 must not shard this model

    model = load_weights(model_description, model_description.dtype)
    expected = _compute_digests(model, report_progress)
    adapted: Any = wrap_with_adapter(model, adapter, PeftConfig.from_pretrained(adapter))
    targets = {name.removeprefix(_PREFIX): module for name, module in adapted.named_modules() if _is_target(module)}
    sums = {f"{name}.weight": _digest(_add_update(layer)) for name, layer in targets.items() if _has_plain_sum(layer)}
    others = tuple(f"{name}." for name in targets if f"{name}.weight" not in sums)
    others += tuple(f"{name}.bias" for name, layer in targets.items() if any(getattr(layer, "lora_bias", {}).values()))
    model = adapted.merge_and_unload()
    merged = _compute_digests(model, report_progress)
    unknown = {name: digest for name, digest in merged.items() if name.startswith(others)}
    expected |= sums | _digest_biases(adapter, model) | unknown
    model.save_pretrained(folder)
    del model, adapted, targets  # before the merged model is loaded
    save_tokenizer_and_processors(model_description, folder)
    local = model_description.local.model_copy(update={"name": str(folder), "revision": None})
    reloaded = load_weights(replace(model_description, local=local), model_description.dtype)
    for digests in (merged, _compute_digests(reloaded, report_progress)):
        if differing := sorted(name for name in expected if digests.get(name) != expected[name]):
            raise ModelError(
                f"spec.lora.merge: {len(differing)} tensors of the merged model are wrong, such as {differing[0]};"
                " leave merge out, and merge the adapter yourself"
            )


def _is_target(module: torch.nn.Module) -> bool:
    return isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)


def _has_plain_sum(layer: torch.nn.Module) -> bool:
    """Return whether the merged weight is the sum of weight and update, unlike with DoRA and fused weights."""
    return isinstance(layer, LoraLayer) and not isinstance(layer, ParamWrapper) and not layer.lora_variant


def _add_update(layer: Any) -> torch.Tensor:
    """Return the sum of the weight and its update, rounded once."""
    weight = layer.get_base_layer().weight
    total: torch.Tensor = weight.float() + layer.get_delta_weight(TRAINED_ADAPTER).float()
    return total.to(weight.dtype)


def _digest_biases(adapter: Path, model: torch.nn.Module) -> dict[str, str]:
    """Return the digests of the biases that an adapter with `bias` contains, by their names in the merged model."""
    digests: dict[str, str] = {}
    with safe_open(adapter / SAFETENSORS_WEIGHTS_NAME, "pt") as file:
        for key in filter(_is_bias, file.keys()):
            name = key.removeprefix(_PREFIX).replace(".base_layer.", ".")
            digests[name] = _digest(file.get_tensor(key).to(model.get_parameter(name).dtype))
    return digests


def _is_bias(key: str) -> bool:
    return key.endswith(".bias") and "lora_" not in key


def _compute_digests(model: torch.nn.Module, report_progress: Callable[[], None]) -> dict[str, str]:
    """Return the digest of each tensor by its name; a shared tensor has several names."""
    digests: dict[str, str] = {}
    for name, tensor in model.state_dict().items():
        digests[name] = _digest(tensor)
        report_progress()
    return digests


def _digest(tensor: torch.Tensor) -> str:
    return sha256(tensor.detach().flatten().view(torch.uint8).numpy().data).hexdigest()
