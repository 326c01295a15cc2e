"""Rejects model types that cannot be trained as the spec requests, and names the alternatives."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from finetune_api.v1alpha1.job import TrainerSpec
from finetune_api.v1alpha1.model_source import ModelSource
from finetune_trainer.errors import InvalidSpec, ModelError
from finetune_trainer.model.text_part import find_unreached_modules
from finetune_trainer.vision.families import FAMILIES
from finetune_trainer.vision.towers import choose_auto_class, find_towers

_MAX_SIZES = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "depth", "encoder_layers"), 1000),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head"), 10**5),
    **dict.fromkeys(("hidden_size", "n_embd", "intermediate_size", "vocab_size"), 10**7),
}
ROUTER_LOGITS_OPTION = "output_router_logits"  # option of the forward pass, which then returns `aux_loss`
ROUTER_LOSS_FUNCTION = "load_balancing_loss_func"  # in the modules of transformers whose models compute `aux_loss`


def _suggest_converted_internvl(name: str) -> str:
    """Return the name of the converted repository; the publisher has one for each model since InternVL3."""
    if "InternVL3" not in name:
        return (
            "use a converted model, such as OpenGVLab/InternVL3-8B-hf; of the models before InternVL3, only"
            " InternVL2_5-2B-MPO-hf and InternVL2_5-8B-MPO-hf are converted"
        )
    return f'use the converted model "{name}{"-HF" if "InternVL3_5" in name else "-hf"}"'


def _suggest_other_model(_name: str) -> str:
    return f"choose a vision-language model of type {', '.join(FAMILIES)}, or run your own script (spec.command)"


def _suggest_known_type(_name: str) -> str:
    return "choose a model of a type that transformers defines"


# Types with remote code that transformers does not define, and the remedy for a repository of this name.
_REMOTE_CODE_REMEDIES: Mapping[str, Callable[[str], str]] = {
    "internvl_chat": _suggest_converted_internvl,
    "minicpmv": _suggest_other_model,
    "minicpmo": _suggest_other_model,
    "ovis": _suggest_other_model,
    "ovis2_5": _suggest_other_model,
    "deepseek_vl_v2": _suggest_other_model,
}


def check_needs_no_remote_code(source: ModelSource, config: Mapping[str, Any]) -> None:
    """Raise InvalidSpec if the content of config.json names a type that transformers can load only with remote code."""
    model_type = str(config.get("model_type"))
    if model_type in CONFIG_MAPPING or (model_type not in _REMOTE_CODE_REMEDIES and "auto_map" not in config):
        return
    suggest = _REMOTE_CODE_REMEDIES.get(model_type, _suggest_known_type)
    raise InvalidSpec(
        f'spec.model.name: "{source.name}" is of type {model_type}, which needs program code from its repository, and'
        f" the trainer runs none; {suggest(source.name)}"
    )


def check_sizes(config: Mapping[str, Any]) -> None:
    """Check the sizes in config.json that determine how long building the model takes. Raises: ModelError."""
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for name, limit in _MAX_SIZES.items():
            value = part.get(name)
            if value is not None and not (isinstance(value, int) and 0 < value <= limit):
                raise ModelError(f"config.json: {name} is {str(value)[:50]}, and must be from 1 to {limit}; correct it")


def check_towers(source: ModelSource, config: PretrainedConfig) -> None:
    """Raise InvalidSpec if the model has towers that are neither trained nor excluded by textOnly, or has none."""
    towers = find_towers(config)
    if source.text_only and not towers:
        raise InvalidSpec(
            f'spec.model.textOnly: model "{source.name}" is of type {config.model_type}, which has no vision, audio or'
            " speech part; leave it out"
        )
    if not towers or source.text_only or config.model_type in FAMILIES:
        return
    raise InvalidSpec(
        f'spec.model.name: "{source.name}" is of type {config.model_type}, whose {" and ".join(towers)} cannot be'
        f" trained here; {_offer_text_training(config)}choose a vision-language model of type {', '.join(FAMILIES)}"
    )


def check_router_loss(spec: TrainerSpec, config: PretrainedConfig) -> None:
    """Raise InvalidSpec if the spec weights the auxiliary loss of experts, but the model does not compute it."""
    if spec.training.router_aux_loss_coef is None:
        return
    model_class = choose_auto_class(config)._model_mapping[type(config)]
    if not hasattr(sys.modules[model_class.__module__], ROUTER_LOSS_FUNCTION):
        raise InvalidSpec(
            f'spec.training.routerAuxLossCoef: model "{spec.model.name}" of type {config.model_type} has no auxiliary'
            " loss that balances experts; leave it out"
        )


def find_frozen_modules(source: ModelSource, config: PretrainedConfig) -> tuple[str, ...]:
    """Return the modules that textOnly freezes, or none without textOnly. Raises: InvalidSpec."""
    if not source.text_only:
        return ()
    try:
        return find_unreached_modules(config)
    except ModelError as error:
        raise InvalidSpec(f'spec.model.textOnly: model "{source.name}": {error}; choose another model') from error


def _offer_text_training(config: PretrainedConfig) -> str:
    """Return the offer to set textOnly, or an empty string if the model cannot be trained on text alone."""
    try:
        find_unreached_modules(config)
    except ModelError:
        return ""
    return "set spec.model.textOnly: true to train its text part and keep the rest unchanged, or "
