"""Converts the options of LLaMA-Factory to a job of our own trainer."""

from typing import Any

from finetune_convert.conversion import ConversionError, EntryEffect
from finetune_convert.data_paths import is_path
from finetune_convert.mapping.converters import (
    read_number,
    read_value,
    to_bool,
    to_length,
    to_reporters,
    to_whole_alpha,
)
from finetune_convert.mapping.rules import Options, Unconvertible, apply_rules
from finetune_convert.mapping.tool_input import (
    check_unresolved,
    is_vision_model,
    place_on_nodes,
)
from finetune_convert.mapping.trainer_conversion import TrainerConversion, select_rules
from finetune_convert.mapping.training_settings import SettingNames, TrainerSettings
from finetune_convert.option_rules.llamafactory import RULES

TOOL = "LLaMA-Factory"
LEARNING_RATE = 5e-5
DATASET_FOLDER = "data"
_PARTS = {
    "vision": "freeze_vision_tower",
    "aligner": "freeze_multi_modal_projector",
    "language": "freeze_language_model",
}
_QUANTIZATION = (
    "quantization_bit",
    "quantization_method",
    "quantization_type",
    "double_quantization",
    "quantization_device_map",
)
_NAMES = SettingNames(early_stopping=("early_stopping_steps",))
_MAX_PIXELS = 768 * 768  # default of image_max_pixels


def find_quantization_problem(options: Options, tuner: str) -> str | None:
    """Return why our trainer has no such quantization, or None."""
    bits = options.get("quantization_bit")
    if not bits:
        return None
    method = str(options.get("quantization_method") or "bnb")
    if str(bits) != "4" or method not in ("bnb", "bitsandbytes") or options.get("quantization_type") != "nf4":
        return f"{method} with {bits} bits: this trainer has NF4 with 4 bits"
    return "quantized weights need LoRA" if tuner == "full" else None


def convert_for_trainer(conversion: TrainerConversion) -> None:
    """Convert a config to a job of our own trainer.

    Raises: ConversionError
    """
    options, draft = conversion.options, conversion.draft
    rules = select_rules(
        RULES, is_full=conversion.is_full, has_adapter=options.has("adapter_name_or_path"), is_dpo=conversion.is_dpo
    )
    check_unresolved(options.given.values(), rules)
    topology = place_on_nodes(draft, conversion.source, for_trainer=True, ranks_fill_devices=True)
    _add_model(conversion)
    _add_method(conversion)
    _add_rows(conversion)
    apply_rules(options, rules, draft, tool=TOOL)
    _add_freeze(conversion)
    conversion.add_learning_rate(LEARNING_RATE)
    settings = TrainerSettings(conversion, _NAMES, topology)
    settings.add_batch()
    settings.add_schedule()
    settings.add_evaluation(default_strategy="no")
    settings.add_checkpoints()
    settings.add_best_model()
    settings.add_upload(push=("push_to_hub",), repo=("hub_model_id",), private=("hub_private_repo",), hub="huggingface")
    _add_memory(conversion)
    _add_reporters(conversion)
    conversion.finish()


def _add_model(conversion: TrainerConversion) -> None:
    options, draft = conversion.options, conversion.draft
    name = conversion.place_model(("model_name_or_path",), str(options.get("model_name_or_path")))
    draft.set("model.name", name)
    if _uses_modelscope(conversion) and not is_path(name):
        draft.set("model.hub", "modelscope")
    revision = options.get("model_revision")
    if revision not in (None, "main") and not name.startswith("/"):
        draft.set("model.revision", str(revision))
        conversion.note(("model_revision",), EntryEffect.TAKEN, "", "model.revision")
    else:
        conversion.note(("model_revision",), EntryEffect.SAME, "the main branch, or the files of the folder")
    conversion.note(
        ("template",),
        EntryEffect.EDIT,
        "the chat template of the model's tokenizer is used; check that it is the same",
    )
    dtype = (
        "bfloat16"
        if to_bool(options.get("bf16")) or to_bool(options.get("pure_bf16"))
        else "float16"
        if to_bool(options.get("fp16"))
        else "float32"
    )
    if dtype == "float32":
        draft.note(
            "bf16",
            EntryEffect.NOTE,
            f"{TOOL} trains in float32 without bf16 or fp16; model.torchDtype auto keeps the dtype of the model",
        )
        conversion.note(("bf16", "fp16", "pure_bf16"), EntryEffect.SAME, "see model.torchDtype")
    else:
        draft.set("model.torchDtype", dtype)
        conversion.note(("bf16", "fp16", "pure_bf16"), EntryEffect.MAPPED, dtype, "model.torchDtype")


def _add_method(conversion: TrainerConversion) -> None:
    options, draft = conversion.options, conversion.draft
    stage, tuner = str(options.get("stage")), str(options.get("finetuning_type"))
    draft.set(stage, {})
    conversion.note(("stage",), EntryEffect.MAPPED, f"spec.{stage}", stage)
    conversion.note(
        ("finetuning_type",),
        EntryEffect.MAPPED if tuner in ("lora", "full") else EntryEffect.CHANGED,
        f"{tuner}: {'all weights are trained' if conversion.is_full else 'spec.lora'}",
    )
    if not conversion.is_full:
        draft.set("lora", {})
        _add_lora(conversion)
    else:
        conversion.note(
            ("lora_alpha", "lora_target", "adapter_name_or_path", "create_new_adapter", *_QUANTIZATION),
            EntryEffect.UNUSED,
            "full fine-tuning has no adapters",
        )
    conversion.note(("additional_target",), EntryEffect.CHANGED, "this trainer trains adapters only")
    if conversion.is_dpo:
        conversion.add_dpo_loss("pref_loss", "dpo_label_smoothing", options.get("pref_loss"))
    else:
        conversion.note(("pref_loss", "dpo_label_smoothing"), EntryEffect.UNUSED, "only dpo uses it")


def _add_lora(conversion: TrainerConversion) -> None:
    options, draft = conversion.options, conversion.draft
    adapter = options.get("adapter_name_or_path")
    if adapter and not to_bool(options.get("create_new_adapter")):
        conversion.add_adapter(("adapter_name_or_path",), str(adapter).partition(",")[0])
        conversion.note(
            ("lora_alpha", "create_new_adapter"), EntryEffect.UNUSED, "the adapter has its own rank and scaling"
        )
    elif adapter:
        conversion.note(
            ("adapter_name_or_path", "create_new_adapter"),
            EntryEffect.CHANGED,
            "merge the adapter into the model first",
        )
    else:
        conversion.note(("adapter_name_or_path",), EntryEffect.SAME, "there is no earlier adapter")
    has_adapter = draft.get("lora.adapter") is not None
    conversion.add_targets(("lora_target",), options.get("lora_target"), has_adapter=has_adapter)
    if not has_adapter:
        rank = int(read_number(options, "lora_rank"))
        alpha = read_value(options, to_whole_alpha, "lora_alpha", default=2 * rank)
        conversion.state(("lora_alpha",), "lora.loraAlpha", alpha, "twice the rank")
        conversion.note(("create_new_adapter",), EntryEffect.SAME, "there is no other adapter")
    conversion.add_quantization(
        _QUANTIZATION,
        is_quantized=bool(options.get("quantization_bit")),
        double=to_bool(options.get("double_quantization")),
        problem=find_quantization_problem(options, "lora"),
    )


def _add_rows(conversion: TrainerConversion) -> None:
    options, draft = conversion.options, conversion.draft
    names = _split_names(options.get("dataset"))
    if not names:
        raise ConversionError("the config names no dataset; add dataset")
    folder = str(options.get("dataset_dir") or DATASET_FOLDER)
    rows = int(read_number(options, "max_samples"))
    draft.set("dataset.train", [_build_source(conversion, "dataset", name, folder) for name in names])
    conversion.note(("dataset",), EntryEffect.MAPPED, f"sources: {len(names)}", "dataset.train")
    conversion.note(("dataset_dir",), EntryEffect.MAPPED, "is the folder of the data on the volume", "volumes")
    if rows > 0:
        message = f"limits each dataset to {rows} rows; name#{rows} draws as many, also of fewer: add it to the names"
        conversion.note(("max_samples",), EntryEffect.CHANGED, message, "dataset.train")
    else:
        conversion.note(("max_samples",), EntryEffect.SAME, "all rows are used")
    evaluation = _split_names(options.get("eval_dataset"))
    if evaluation:
        sources = [_build_source(conversion, "eval_dataset", name, folder) for name in evaluation]
        draft.set("dataset.eval", sources)
        conversion.note(("eval_dataset",), EntryEffect.MAPPED, f"sources: {len(evaluation)}", "dataset.eval")
    else:
        conversion.note(("eval_dataset",), EntryEffect.SAME, "there are no separate evaluation rows")
    conversion.add_split(("val_size",), read_number(options, "val_size"), has_evaluation=bool(evaluation))
    _add_lengths(conversion)
    if not conversion.is_dpo:
        _add_loss(conversion)
    conversion.note(
        ("train_on_prompt", "mask_history") if conversion.is_dpo else (), EntryEffect.UNUSED, "only sft uses it"
    )
    conversion.add_thinking("enable_thinking")


def _split_names(value: Any) -> list[str]:
    names = value if isinstance(value, list) else str(value or "").split(",")
    return [str(name).strip() for name in names if str(name).strip()]


def _build_source(conversion: TrainerConversion, option: str, name: str, folder: str) -> dict[str, str]:
    place = _place_dataset(conversion, option, name, folder)
    uses_hub = _uses_modelscope(conversion) and place == name and not is_path(name)
    return {"name": place, "hub": "modelscope"} if uses_hub else {"name": place}


def _uses_modelscope(conversion: TrainerConversion) -> bool:
    """Return whether ids are those of ModelScope."""
    variable = conversion.source.environment.get("USE_MODELSCOPE_HUB")
    return variable is not None and variable.text.lower() in ("1", "true", "y")


def _place_dataset(conversion: TrainerConversion, option: str, name: str, folder: str) -> str:
    """Return the path of a dataset: dataset_info.json, which is not part of the input, has the name of the file."""
    requested = conversion.source.request.datasets
    line = conversion.options.get_line(option)
    if name in requested:
        conversion.draft.note(option, EntryEffect.MAPPED, f"{name} is {requested[name]}, as requested", line=line)
        return requested[name]
    if folder == "ONLINE" or ("/" in name and not is_path(name)):
        return name
    path = name if is_path(name) else f"{folder}/{name}.json"
    path = path.removeprefix(f"{DATASET_FOLDER}/")
    if is_path(name):
        return conversion.paths.place(option, path, line=line)
    message = (
        f"{name} is an entry of dataset_info.json, which is not part of the input; {path} is assumed: state its source"
        f" with --dataset {name}=SOURCE"
    )
    conversion.draft.note(option, EntryEffect.EDIT, message, field="dataset", line=line)
    return conversion.paths.place(option, path, line=line)


def _add_lengths(conversion: TrainerConversion) -> None:
    options, draft = conversion.options, conversion.draft
    length = read_value(options, to_length, "cutoff_len")
    conversion.state(("cutoff_len",), "dataset.maxLength", length)
    draft.set("dataset.overlong", "truncate")
    message = "long rows are truncated at their end; LLaMA-Factory truncates prompt and completion in proportion"
    draft.note(
        "cutoff_len", EntryEffect.CHANGED, message, field="dataset.overlong", line=options.get_line("cutoff_len")
    )
    packing = to_bool(options.get("packing")) or to_bool(options.get("neat_packing"))
    if packing and not conversion.is_dpo:
        draft.set("dataset.packing", True)
        is_neat = to_bool(options.get("neat_packing"))
        message = "rows of a pack do not attend to each other" + (
            "" if is_neat else "; with packing alone, they do in LLaMA-Factory"
        )
        conversion.note(
            ("packing", "neat_packing"),
            EntryEffect.MAPPED if is_neat else EntryEffect.CHANGED,
            message,
            "dataset.packing",
        )
    else:
        conversion.note(("packing", "neat_packing"), EntryEffect.SAME, "rows are not packed")


def _add_loss(conversion: TrainerConversion) -> None:
    options, draft = conversion.options, conversion.draft
    if to_bool(options.get("train_on_prompt")):
        draft.set("sft.lossOn", "all")
    elif to_bool(options.get("mask_history")):
        draft.set("sft.lossOn", "lastTurn")
    conversion.note(
        ("train_on_prompt", "mask_history"),
        EntryEffect.MAPPED,
        str(draft.get("sft.lossOn") or "assistant"),
        "sft.lossOn",
    )


def _add_freeze(conversion: TrainerConversion) -> None:
    options, draft = conversion.options, conversion.draft
    names = tuple(_PARTS.values())
    if not is_vision_model(str(draft.get("model.name"))):
        conversion.note(names, EntryEffect.UNUSED, "the model has no vision part, by its name")
        return
    frozen = [part for part, name in _PARTS.items() if to_bool(options.get(name))]
    if len(frozen) == 3:
        raise ConversionError("the freeze options freeze the whole model; nothing is trained")
    if frozen != ["vision", "aligner"]:
        draft.set("model.freeze", frozen)
    conversion.note(names, EntryEffect.MAPPED, f"frozen parts: {', '.join(frozen) or 'none'}", "model.freeze")
    if draft.get("model.maxPixels") is None:
        conversion.state(("image_max_pixels",), "model.maxPixels", _MAX_PIXELS, "768 * 768")


def _add_memory(conversion: TrainerConversion) -> None:
    options, draft = conversion.options, conversion.draft
    path, name = "training.gradientCheckpointing", "disable_gradient_checkpointing"
    if not to_bool(options.get(name)):
        draft.set(path, True)
        if not options.has(name, "gradient_checkpointing"):
            draft.note(
                "gradient_checkpointing", EntryEffect.DEFAULT, f"{TOOL} recomputes activations by default", field=path
            )
    conversion.note((name, "gradient_checkpointing"), EntryEffect.MAPPED, str(bool(draft.get(path))).lower(), path)
    conversion.add_deepspeed(("deepspeed",), options.get("deepspeed"))
    conversion.add_fsdp(("fsdp",), ("fsdp_config",), offload="offload" in str(options.get("fsdp")))
    conversion.note_checkpoint("resume_from_checkpoint")


def _add_reporters(conversion: TrainerConversion) -> None:
    options, draft = conversion.options, conversion.draft
    value = options.get("report_to")
    reporters: list[str] | None = None
    try:
        reporters = to_reporters(value) if options.has("report_to") else None
    except Unconvertible as error:
        conversion.note(("report_to",), EntryEffect.CHANGED, str(error), "training.reportTo")
    if to_bool(options.get("use_swanlab")):
        reporters = [*(name for name in reporters or [] if name != "none"), "swanlab"]
    if reporters:
        draft.set("training.reportTo", list(dict.fromkeys(reporters)))
    conversion.note(
        ("report_to", "use_swanlab"), EntryEffect.MAPPED, " ".join(reporters or ["the default"]), "training.reportTo"
    )
