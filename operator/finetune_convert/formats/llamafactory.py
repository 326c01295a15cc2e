"""Converts configs and commands of LLaMA-Factory."""

import json
from collections.abc import Mapping, Sequence

from finetune_convert.conversion import ConversionError, Entry, EntryEffect, JobForm, Tree
from finetune_convert.formats.llamafactory_trainer import TOOL, convert_for_trainer, find_quantization_problem
from finetune_convert.job_draft import JobDraft
from finetune_convert.mapping.arguments import is_option, parse_arguments, parse_config
from finetune_convert.mapping.converters import read_number
from finetune_convert.mapping.program import build_program_job
from finetune_convert.mapping.rules import Given, Options, find_program_reasons, list_unknown
from finetune_convert.mapping.tool_input import (
    ToolInput,
    build_name,
    choose_form,
    explain_program,
    find_device_reasons,
    start_draft,
)
from finetune_convert.mapping.trainer_conversion import TrainerConversion, find_dpo_problem, select_rules
from finetune_convert.option_rules.llamafactory import RULES
from finetune_convert.option_table import load_table
from finetune_convert.shell.words import ADDED, Word

METHODS = ("sft", "dpo")


def convert_llamafactory(source: ToolInput, config: Tree, lines: Mapping[str, int]) -> tuple[str, JobDraft]:
    """Convert a config. lines: the line of each key."""
    return _convert(source, parse_config(config, load_table("llamafactory"), lines))


def convert_llamafactory_command(source: ToolInput, words: Sequence[Word]) -> tuple[str, JobDraft]:
    """Convert `llamafactory-cli train` with options, or with a config file and overrides."""
    if words and not is_option(words[0]):
        return _convert_config_file(source, words)
    given, entries = parse_arguments(words, load_table("llamafactory"))
    source.entries += entries
    return _convert(source, given)


def _convert_config_file(source: ToolInput, words: Sequence[Word]) -> tuple[str, JobDraft]:
    """Run the original program with the config file, which is not part of the input, from a ConfigMap."""
    path = words[0].text
    file = path.rpartition("/")[2]
    name = build_name(file.partition(".")[0])
    message = (
        f"the content of {path} is not part of the input; run finetune convert {path} to convert it for this trainer"
    )
    source.entries.append(Entry(path, EntryEffect.NOTE, message, line=words[0].line))
    mounted = Word(f"/config/{file}", words[0].line, words[0].unresolved)
    source.launch.program = (Word("llamafactory-cli", words[0].line), Word("train", words[0].line), mounted, *words[1:])
    if not any(word.text.startswith("output_dir=") for word in words):
        source.launch.program += (Word("output_dir=$(FINETUNE_OUTPUT)", ADDED),)
    source.launch.launcher = ""
    draft = build_program_job(source, name=name, image="llamafactory")
    add_config_map(draft, path, file, line=words[0].line)
    _force_torchrun(draft)
    return f"{TOOL}: {path}", draft


def add_config_map(draft: JobDraft, path: str, file: str, *, line: int | None = None) -> None:
    """Mount a ConfigMap with a config file at /config."""
    name = f"{draft.name}-config"
    draft.entries = [
        entry for entry in draft.entries if not (entry.effect is EntryEffect.EDIT and entry.option == f"/config/{file}")
    ]
    draft.spec.setdefault("volumes", []).append(
        {"name": "config-file", "mountPath": "/config", "configMap": {"name": name}}
    )
    message = f"create the ConfigMap of the config: kubectl create configmap {name} --from-file={file}={path}"
    draft.note(path, EntryEffect.EDIT, message, field="volumes", line=line)


def _force_torchrun(draft: JobDraft) -> None:
    if not any(variable["name"] == "FORCE_TORCHRUN" for variable in draft.spec.get("env", [])):
        draft.spec["env"] = [*draft.spec.get("env", []), {"name": "FORCE_TORCHRUN", "value": "1"}]
        draft.note(
            "FORCE_TORCHRUN",
            EntryEffect.NOTE,
            "is set, because LLaMA-Factory starts one GPU without torchrun otherwise",
            field="env",
        )


def _convert(source: ToolInput, given: dict[str, Given]) -> tuple[str, JobDraft]:
    options = Options(load_table("llamafactory"), "train", given)
    stage, tuner = str(options.get("stage")), str(options.get("finetuning_type"))
    model = options.get("model_name_or_path")
    if not model:
        raise ConversionError("the config names no model; add model_name_or_path")
    description = f"{TOOL}: {stage} ({tuner})"
    reasons = [*_list_reasons(options, stage, tuner), *find_device_reasons(source)]
    is_possible = stage in METHODS
    form = choose_form(source.request, reasons, is_possible=is_possible, what=f"this trainer has no stage {stage}")
    name = build_name(str(model), stage)
    if form is not JobForm.TRAINER:
        source.entries += list_unknown(options, TOOL)
        return description, _build_command_job(source, options, name, reasons)
    draft = start_draft(source, name)
    is_full, is_dpo = tuner == "full", stage == "dpo"
    convert_for_trainer(TrainerConversion(source, options, draft, TOOL, is_full=is_full, is_dpo=is_dpo))
    return description, draft


def _list_reasons(options: Options, stage: str, tuner: str) -> list[str]:
    is_full, has_adapter = tuner == "full", options.has("adapter_name_or_path")
    rules = select_rules(RULES, is_full=is_full, has_adapter=has_adapter, is_dpo=stage == "dpo")
    reasons = [f"{given.name}: {reason}" for given, reason in find_program_reasons(options, rules)]
    if stage not in METHODS:
        reasons.append(f"stage {stage}: this trainer has sft and dpo")
    if tuner not in ("lora", "full"):
        reasons.append(f"finetuning_type {tuner}: this trainer has LoRA and full fine-tuning")
    if stage == "dpo" and (
        problem := find_dpo_problem(options.get("pref_loss"), read_number(options, "dpo_label_smoothing"))
    ):
        reasons.append(f"pref_loss: {problem}")
    if quantization := find_quantization_problem(options, tuner):
        reasons.append(f"quantization_bit: {quantization}")
    if options.get("additional_target"):
        reasons.append("additional_target: this trainer trains adapters only")
    return reasons


def _build_command_job(source: ToolInput, options: Options, name: str, reasons: Sequence[str]) -> JobDraft:
    explain_program(source, reasons)
    words = [Word("llamafactory-cli", 1), Word("train", 1)]
    for given in options.given.values():
        words += _list_words(given)
    source.launch.program, source.launch.launcher = tuple(words), ""
    draft = build_program_job(source, name=name, image="llamafactory")
    _force_torchrun(draft)
    return draft


def _list_words(given: Given) -> list[Word]:
    """Return an option as the words of a command."""
    line = given.line or 1
    match given.value:
        case list() as values:
            texts = (
                [",".join(map(str, values))]
                if given.name in ("dataset", "eval_dataset", "lora_target")
                else list(map(str, values))
            )
        case dict() as config:
            texts = [json.dumps(config)]
        case None:
            return []
        case bool() as flag:
            texts = [str(flag).lower()]
        case value:
            texts = [str(value)]
    return [Word(f"--{given.name}", line), *(Word(text, line, given.unresolved) for text in texts)]
