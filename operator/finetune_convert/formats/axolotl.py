"""Converts configs of axolotl."""

from collections.abc import Mapping, Sequence
from typing import Any

from finetune_convert.conversion import ConversionError, Entry, EntryEffect, JobForm, Tree
from finetune_convert.formats.axolotl_trainer import METHODS, TOOL, convert_for_trainer, get_loss, select_axolotl_rules
from finetune_convert.formats.llamafactory import add_config_map
from finetune_convert.job_draft import JobDraft
from finetune_convert.mapping.arguments import parse_config
from finetune_convert.mapping.converters import as_list, read_number, to_bool
from finetune_convert.mapping.program import build_program_job
from finetune_convert.mapping.rules import Options, find_program_reasons
from finetune_convert.mapping.tool_input import (
    ToolInput,
    build_name,
    choose_form,
    explain_program,
    start_draft,
)
from finetune_convert.mapping.trainer_conversion import TrainerConversion, find_dpo_problem
from finetune_convert.option_table import load_table
from finetune_convert.shell.words import ADDED, Word

CONFIG_FILE = "axolotl.yaml"
_ADAPTERS = ("lora", "qlora")
_FAST_PLUGINS = ("liger", "cut_cross_entropy", "spectrum_none")


def convert_axolotl(source: ToolInput, config: Tree, lines: Mapping[str, int]) -> tuple[str, JobDraft]:
    """Convert a config. lines: the line of each key.

    Raises: ConversionError
    """
    table = load_table("axolotl")
    options = Options(table, "train", parse_config(config, table, lines))
    model, method = options.get("base_model"), options.get("rl")
    if not model:
        raise ConversionError("the config names no model; add base_model")
    adapter = options.get("adapter") or None
    description = f"{TOOL}: {method or 'sft'} ({adapter or 'full'})"
    reasons = _list_reasons(options)
    form = choose_form(source.request, reasons, is_possible=method in METHODS, what=f"this trainer has no rl: {method}")
    name = build_name(str(model), str(method or "sft"))
    if form is not JobForm.TRAINER:
        return description, _build_command_job(source, name, reasons)
    draft = start_draft(source, name)
    is_full, is_dpo = adapter is None, METHODS.get(method) == "dpo"
    convert_for_trainer(TrainerConversion(source, options, draft, TOOL, is_full=is_full, is_dpo=is_dpo))
    return description, draft


def _list_reasons(options: Options) -> list[str]:
    method, adapter = options.get("rl"), options.get("adapter") or None
    rules = select_axolotl_rules(options)
    reasons = [f"{given.name}: {reason}" for given, reason in find_program_reasons(options, rules)]
    if method not in METHODS:
        reasons.append(f"rl {method}: this trainer has sft and dpo")
    if adapter not in (None, *_ADAPTERS):
        reasons.append(f"adapter {adapter}: this trainer has LoRA and full fine-tuning")
    if to_bool(options.get("load_in_8bit")) and adapter:
        reasons.append("load_in_8bit: this trainer quantizes to 4 bits")
    if options.get("pretraining_dataset"):
        reasons.append("pretraining_dataset: this trainer has no pretraining on plain text")
    plugins = [
        str(name)
        for name in as_list(options.get("plugins"))
        if not any(word in str(name).lower() for word in _FAST_PLUGINS)
    ]
    if plugins:
        reasons.append(f"plugins {plugins[0]}: this trainer has no plug-ins")
    tokens = options.get("special_tokens")
    if isinstance(tokens, dict) and set(tokens) - {"pad_token"}:
        reasons.append("special_tokens: this trainer uses the tokens of the model")
    if method == "dpo" and (
        problem := find_dpo_problem(get_loss(options), read_number(options, "dpo_label_smoothing"))
    ):
        reasons.append(f"dpo_loss_type: {problem}")
    for entry in as_list(options.get("datasets")):
        reasons += [f"datasets: {problem}" for problem in _find_dataset_problems(entry)]
    return list(dict.fromkeys(reasons))


def _find_dataset_problems(entry: Any) -> list[str]:
    if not isinstance(entry, dict):
        return [f"expected an object with path and type, found {entry}"]
    kind = entry.get("type")
    if isinstance(kind, dict):
        return ["a type with its own prompt format: this trainer renders the chat template of the model"]
    if kind == "completion":
        return ["type completion: this trainer has no plain text without a prompt"]
    if entry.get("shards") or entry.get("drop_system_message"):
        return ["shards and drop_system_message: this trainer reads the rows as they are"]
    return []


def convert_axolotl_command(source: ToolInput, words: Sequence[Word]) -> tuple[str, JobDraft]:
    """Run the original program with a config file, which is not part of the input. words: the file and overrides."""
    path, line = words[0].text, words[0].line
    message = f"the content of {path} is not part of the input; convert the file itself for this trainer"
    source.entries.append(Entry(path, EntryEffect.NOTE, message, line=line))
    name = build_name(path.rpartition("/")[2].partition(".")[0])
    return f"{TOOL}: {path}", _build_config_job(source, name, path, words[1:])


def _build_command_job(source: ToolInput, name: str, reasons: Sequence[str]) -> JobDraft:
    """Return a job that runs axolotl with the config from a ConfigMap."""
    explain_program(source, reasons)
    return _build_config_job(source, name, "FILE", ())


def _build_config_job(source: ToolInput, name: str, path: str, overrides: Sequence[Word]) -> JobDraft:
    line = overrides[0].line if overrides else 1
    output = (Word("--output_dir", ADDED), Word("output", ADDED))
    source.launch.program, source.launch.launcher = (Word("axolotl", line), *overrides, *output), ""
    draft = build_program_job(source, name=name, image="axolotl")
    _, *arguments = draft.spec["command"]["exec"]
    draft.spec["command"] = {"exec": ["torchrun", "-m", "axolotl.cli.train", f"/config/{CONFIG_FILE}", *arguments]}
    add_config_map(draft, path, CONFIG_FILE)
    return draft
