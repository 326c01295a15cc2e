"""Converts the keys of axolotl's config to a job of our own trainer."""

from collections.abc import Mapping
from typing import Any

from finetune_convert.conversion import ConversionError, EntryEffect, Tree
from finetune_convert.data_paths import is_path
from finetune_convert.formats.axolotl_settings import add_settings
from finetune_convert.mapping.converters import (
    as_list,
    bounded_float,
    read_number,
    read_value,
    to_attention,
    to_bool,
    to_length,
    to_whole_alpha,
)
from finetune_convert.mapping.rules import Options, Unconvertible, apply_rules
from finetune_convert.mapping.tool_input import place_on_nodes
from finetune_convert.mapping.trainer_conversion import TrainerConversion, select_rules
from finetune_convert.option_rules.axolotl import RULES

TOOL = "axolotl"
METHODS = {None: "sft", "dpo": "dpo", "ipo": "dpo"}
_OVERLONG = {None: "drop", "drop": "drop", "truncate": "truncate", "raise": "error"}
_CHAT_TYPES = ("chat_template", "sharegpt", None)  # rows with messages, rendered by the chat template
_ALPACA_TYPES = ("alpaca", "alpaca_chat.load_qa", "alpaca_w_system.load_open_orca", "alpaca_chat")
_IGNORED_DATASET_KEYS = (
    "type", "ds_type", "chat_template", "field_messages", "message_property_mappings", "message_field_role",
    "message_field_content", "roles", "field", "preprocess_shards", "trust_remote_code",
)  # fmt: skip
_ATTENTION = {
    "flash_attention": "flash_attention_2", "sdp_attention": "sdpa", "eager_attention": "eager",
    "xformers_attention": None, "flex_attention": None, "sage_attention": None,
}  # fmt: skip


def select_axolotl_rules(options: Options) -> Mapping[str, Any]:
    """Return the rules that fit the method and adapter of the config."""
    return select_rules(
        RULES,
        is_full=not options.get("adapter"),
        has_adapter=bool(options.get("lora_model_dir")),
        is_dpo=METHODS.get(options.get("rl")) == "dpo",
    )


def get_loss(options: Options) -> Any:
    """Return the loss of dpo; a list of one loss counts as that loss."""
    if options.get("rl") == "ipo":
        return "ipo"
    loss = options.get("dpo_loss_type")
    return loss[0] if isinstance(loss, list) and len(loss) == 1 else loss


def convert_for_trainer(conversion: TrainerConversion) -> None:
    """Convert a config to a job of our own trainer.

    Raises: ConversionError
    """
    options, draft = conversion.options, conversion.draft
    topology = place_on_nodes(draft, conversion.source, for_trainer=True, ranks_fill_devices=True)
    _add_model(conversion)
    draft.set("dpo" if conversion.is_dpo else "sft", {})
    _add_adapter(conversion)
    _add_rows(conversion)
    _add_method(conversion)
    apply_rules(options, select_axolotl_rules(options), draft, tool=TOOL)
    add_settings(conversion, topology)
    conversion.finish()


def _add_model(conversion: TrainerConversion) -> None:
    options, draft = conversion.options, conversion.draft
    name = conversion.place_model(("base_model",), str(options.get("base_model")))
    draft.set("model.name", name)
    revision = options.get("revision_of_model")
    if revision and not name.startswith("/"):
        draft.set("model.revision", str(revision))
    conversion.note(("revision_of_model",), EntryEffect.TAKEN if revision else EntryEffect.SAME, "", "model.revision")
    conversion.note(
        ("special_tokens",),
        EntryEffect.UNUSED,
        "padding has no effect on the loss; other tokens are those of the model",
    )
    conversion.note(("plugins",), EntryEffect.UNUSED, "this trainer computes the loss in tiles, without plug-ins")
    dtypes = {"bfloat16": ("bf16", "bfloat16"), "float16": ("fp16", "float16"), "float32": ("float32",)}
    dtype = next(
        (dtype for dtype, names in dtypes.items() if any(options.get(key) in (True, "full") for key in names)), None
    )
    names = ("bf16", "bfloat16", "fp16", "float16", "float32")
    conversion.choose(names, "model.torchDtype", dtype, absent="the dtype of the model")
    _add_attention(conversion)


def _add_attention(conversion: TrainerConversion) -> None:
    options, path = conversion.options, "model.attnImplementation"
    chosen = next((name for name in _ATTENTION if to_bool(options.get(name))), None)
    try:
        value = _ATTENTION[chosen] if chosen else to_attention(options.get("attn_implementation"))
    except Unconvertible:
        value = None
    if value:
        conversion.draft.set(path, value)
    message = value or "the fastest attention that is installed is used"
    conversion.note(
        ("attn_implementation", *_ATTENTION), EntryEffect.MAPPED if value else EntryEffect.UNUSED, message, path
    )


def _add_adapter(conversion: TrainerConversion) -> None:
    options, draft = conversion.options, conversion.draft
    names = ("lora_target_modules", "lora_target_linear")
    rank_names = ("lora_r", "lora_alpha")
    what = "all weights are trained" if conversion.is_full else f"{options.get('adapter')}: spec.lora"
    conversion.note(("adapter",), EntryEffect.MAPPED, what)
    quantized = to_bool(options.get("load_in_4bit")) or options.get("adapter") == "qlora"
    if conversion.is_full:
        reason = "full fine-tuning has no adapters"
        conversion.note(
            (*names, *rank_names, "lora_model_dir", "load_in_4bit", "load_in_8bit"), EntryEffect.UNUSED, reason
        )
        return
    draft.set("lora", {})
    conversion.choose(("load_in_4bit",), "lora.quantization", "nf4" if quantized else None, absent="not quantized")
    is_8_bit = to_bool(options.get("load_in_8bit"))
    conversion.note(
        ("load_in_8bit",),
        EntryEffect.CHANGED if is_8_bit else EntryEffect.SAME,
        "this trainer quantizes to 4 bits only",
    )
    if adapter := options.get("lora_model_dir"):
        conversion.add_adapter(("lora_model_dir",), str(adapter))
        conversion.note(
            (*names, *rank_names), EntryEffect.UNUSED, "the adapter that is continued has its own rank and modules"
        )
        return
    conversion.note(("lora_model_dir",), EntryEffect.SAME, "there is no earlier adapter")
    value = "all-linear" if to_bool(options.get("lora_target_linear")) else options.get("lora_target_modules")
    if value is None:
        draft.set("lora.targetModules", ["q_proj", "v_proj"])
        draft.note(
            names[0],
            EntryEffect.DEFAULT,
            "peft chooses the modules by the model, q_proj and v_proj for Llama",
            field="lora.targetModules",
        )
    else:
        conversion.add_targets(names, value, has_adapter=False)
    conversion.state(("lora_r",), "lora.r", int(read_number(options, "lora_r", default=8)), "8")
    conversion.state(
        ("lora_alpha",), "lora.loraAlpha", read_value(options, to_whole_alpha, "lora_alpha", default=16), "16"
    )


def _add_rows(conversion: TrainerConversion) -> None:
    options, draft = conversion.options, conversion.draft
    entries = as_list(options.get("datasets"))
    if not entries:
        raise ConversionError("the config names no rows; add datasets")
    draft.set(
        "dataset.train", [source for entry in entries for source in _build_sources(conversion, "datasets", entry)]
    )
    conversion.note(("datasets",), EntryEffect.MAPPED, f"sources: {len(entries)}", "dataset.train")
    evaluation = as_list(options.get("test_datasets"))
    if evaluation:
        draft.set(
            "dataset.eval",
            [source for entry in evaluation for source in _build_sources(conversion, "test_datasets", entry)],
        )
        conversion.note(("test_datasets",), EntryEffect.MAPPED, f"sources: {len(evaluation)}", "dataset.eval")
    else:
        conversion.note(("test_datasets",), EntryEffect.SAME, "there are no separate evaluation rows")
    conversion.add_split(("val_set_size",), read_number(options, "val_set_size"), has_evaluation=bool(evaluation))
    conversion.note(("pretraining_dataset",), EntryEffect.CHANGED, "this trainer has no pretraining on plain text")
    conversion.state(("sequence_len",), "dataset.maxLength", read_value(options, to_length, "sequence_len"), "512")
    overlong = _OVERLONG.get(options.get("excess_length_strategy"), "drop")
    if overlong != "drop":
        draft.set("dataset.overlong", overlong)
    conversion.note(("excess_length_strategy",), EntryEffect.MAPPED, overlong, "dataset.overlong")
    conversion.add_packing("sample_packing")


def _build_sources(conversion: TrainerConversion, option: str, entry: Any) -> list[dict[str, str]]:
    """Return the sources of a dataset: one, or one for each of its files."""
    line = conversion.options.get_line(option)
    if not isinstance(entry, dict) or not entry.get("path"):
        raise ConversionError(f"line {line}: {option}: expected an object with path, found {str(entry)[:60]}")
    path, requested = str(entry["path"]), conversion.source.request.datasets
    if path in requested:
        conversion.draft.note(option, EntryEffect.MAPPED, f"{path} is {requested[path]}, as requested", line=line)
        return [{"name": requested[path]}]
    files = entry.get("data_files") or []
    files = [files] if isinstance(files, str) else list(files)
    _note_type(conversion, option, entry, path)
    names = [str(file) for file in files] if path in ("json", "csv", "parquet") and files else [path]
    source: dict[str, str] = {}
    for key, target in (("split", "split"), ("name", "subset"), ("revision", "revision")):
        if entry.get(key) and not is_path(names[0]):
            source[target] = str(entry[key])
    known = ("path", "data_files", "split", "name", "revision", *_IGNORED_DATASET_KEYS)
    for key in entry:
        if key not in known:
            conversion.draft.note(
                f"{option}.{key}", EntryEffect.CHANGED, "this trainer reads the rows as they are", line=line
            )
    if files and names == [path]:
        conversion.draft.note(
            f"{option}.data_files",
            EntryEffect.CHANGED,
            f"all files of {path} are read; name the files as sources",
            line=line,
        )
    return [
        {"name": conversion.paths.place(option, name, line=line) if is_path(name) else name, **source} for name in names
    ]


def _note_type(conversion: TrainerConversion, option: str, entry: Tree, path: str) -> None:
    kind, line = entry.get("type"), conversion.options.get_line(option)
    if conversion.is_dpo:
        message = f"{path} has type {kind}; its columns must be chosen and rejected, see docs/user-guide/data.md"
    elif kind in _ALPACA_TYPES:
        message = f"{path}: axolotl renders the text of Alpaca prompts, this trainer the chat template of the model"
    elif kind in _CHAT_TYPES:
        renamed = [key for key in entry if key.startswith(("field_", "message_", "roles"))]
        if not renamed:
            return
        message = f"{path}: {', '.join(renamed)} name columns; this trainer has messages, and conversations"
    else:
        message = f"{path}: the type {kind} is unknown here; check the columns, see docs/user-guide/data.md"
    conversion.draft.note(f"{option}.type", EntryEffect.CHANGED, message, line=line)


def _add_method(conversion: TrainerConversion) -> None:
    options, draft = conversion.options, conversion.draft
    conversion.note(("rl",), EntryEffect.MAPPED, "spec.dpo", "dpo")
    conversion.note(
        ("chat_template",),
        EntryEffect.EDIT,
        "the chat template of the model's tokenizer is used; check that it is the same",
    )
    kwargs = options.get("chat_template_kwargs")
    if isinstance(kwargs, dict) and kwargs:
        draft.set("dataset.chatTemplateKwargs", kwargs)
    conversion.note(("chat_template_kwargs",), EntryEffect.TAKEN, "", "dataset.chatTemplateKwargs")
    if not conversion.is_dpo:
        loss_on = "all" if to_bool(options.get("train_on_inputs")) else None
        conversion.choose(("train_on_inputs",), "sft.lossOn", loss_on, absent="assistant turns only")
        conversion.note(
            ("rl_beta", "dpo_beta", "dpo_loss_type", "dpo_label_smoothing", "rpo_alpha"),
            EntryEffect.UNUSED,
            "only dpo uses it",
        )
        return
    conversion.note(("train_on_inputs",), EntryEffect.UNUSED, "only sft uses it")
    beta = read_value(options, bounded_float(0, 100, open_low=True), "dpo_beta", "rl_beta", default=0.1)
    if beta != 0.1:
        draft.set("dpo.beta", beta)
    conversion.note(("dpo_beta", "rl_beta"), EntryEffect.MAPPED, f"{beta:g}", "dpo.beta")
    conversion.add_dpo_loss("dpo_loss_type", "dpo_label_smoothing", get_loss(options))
    if alpha := read_value(options, bounded_float(0, 100), "rpo_alpha"):
        draft.set("dpo.rpoAlpha", alpha)
    conversion.note(("rpo_alpha",), EntryEffect.TAKEN, "", "dpo.rpoAlpha")
