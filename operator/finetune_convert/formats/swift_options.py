"""Reads options of ms-swift that have other names in other versions, and checks what our own trainer supports."""

from typing import Any

from finetune_convert.mapping.converters import read_number
from finetune_convert.mapping.rules import Options
from finetune_convert.mapping.trainer_conversion import find_dpo_problem, parse_json_config
from finetune_convert.mapping.training_settings import SettingNames

MODEL = ("model_id_or_path", "model")
TUNER = ("tuner_type", "train_type", "sft_type")
DATASETS = ("custom_train_dataset_path", "dataset")
EVALUATION_SETS = ("custom_val_dataset_path", "val_dataset")
SPLIT = ("dataset_test_ratio", "split_dataset_ratio")
QUANT_BITS = ("quantization_bit", "quant_bits")
QUANTIZATION = (*QUANT_BITS, "quant_method", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant")
TARGETS = ("lora_target_modules", "target_modules")
DEEPSPEED = ("deepspeed_config_path", "deepspeed")
PARTS = {"vision": "freeze_vit", "aligner": "freeze_aligner", "language": "freeze_llm"}
NAMES = SettingNames(
    micro_batch=("per_device_train_batch_size", "per_gpu_train_batch_size", "batch_size"),
    eval_batch=("per_device_eval_batch_size", "per_gpu_eval_batch_size", "eval_batch_size"),
    eval_strategy=("eval_strategy", "evaluation_strategy"),
    early_stopping=("early_stop_interval",),
)
OVERLONG = {None: "drop", "delete": "drop", "right": "truncate"}
LOSSES = {"default": "assistant", "last_round": "lastTurn", "all": "all"}


def get_first(options: Options, names: tuple[str, ...]) -> Any:
    """Return the value of the first name in the input, otherwise the first default of the version's names."""
    given = next((options.given[name].value for name in names if name in options.given), None)
    return (
        given
        if given is not None
        else next((value for name in names if (value := options.get(name)) is not None), None)
    )


def get_tuner(options: Options) -> str:
    """Return what is trained: lora, full, or another tuner."""
    return str(get_first(options, TUNER) or "lora")


def get_dpo_loss(options: Options) -> Any:
    """Return the loss of dpo; lists of one loss count as that loss."""
    loss = options.get("loss_type")
    return loss[0] if isinstance(loss, list) and len(loss) == 1 else loss


def find_loss_problem(options: Options) -> str | None:
    """Return why our trainer has no such loss weights, or None."""
    scale = options.get("loss_scale")
    if options.get("use_loss_scale") is True:
        return "use_loss_scale: this trainer has no loss weights by content"
    if options.command == "pt" and options.get("use_chat_template") is not True:
        return (
            "pt: its rows are plain text without a chat template; this trainer has that only as prompt and completion"
        )
    if options.get("use_chat_template") is False:
        return "use_chat_template: this trainer uses the chat template of the model"
    if options.has("loss_type") and options.command != "rlhf":
        return "loss_type: this trainer has the usual cross entropy"
    if options.has("loss_scale") and options.command != "rlhf" and scale not in LOSSES:
        return f"loss_scale {scale}: this trainer trains all assistant turns, the last one, or all tokens"
    return None


def find_dpo_loss_problem(options: Options) -> str | None:
    """Return why our trainer has no such loss of dpo, or None."""
    if options.command != "rlhf":
        return None
    problem = find_dpo_problem(get_dpo_loss(options), read_number(options, "label_smoothing"))
    return f"loss_type: {problem}" if problem else None


def find_quantization_problem(options: Options) -> str | None:
    """Return why our trainer has no such quantization, or None."""
    bits, method = get_first(options, QUANT_BITS), options.get("quant_method")
    if not bits and method is None:
        return None
    if method not in (None, "bnb") or str(bits) != "4" or options.get("bnb_4bit_quant_type") != "nf4":
        return f"quant_method {method or 'bnb'} with {bits} bits: this trainer has NF4 with 4 bits"
    return "quant_bits: quantized weights need LoRA" if get_tuner(options) == "full" else None


def find_overlong_problem(options: Options) -> str | None:
    """Return why our trainer does not treat long rows so, or None."""
    strategy = options.get("truncation_strategy")
    return (
        None
        if strategy in OVERLONG
        else f"truncation_strategy {strategy}: this trainer drops long rows, or truncates their end"
    )


def find_deepspeed_problem(options: Options) -> str | None:
    """Return why a DeepSpeed config cannot be read, or None."""
    value = get_first(options, DEEPSPEED)
    is_broken = isinstance(value, str) and value.lstrip().startswith("{") and parse_json_config(value) is None
    return "deepspeed: its value is no JSON object" if is_broken else None
