"""Converts commands of ms-swift: swift sft, pt and rlhf."""

from collections.abc import Sequence

from finetune_convert.conversion import ConversionError, Entry, EntryEffect, JobForm
from finetune_convert.formats.swift_options import (
    MODEL,
    find_deepspeed_problem,
    find_dpo_loss_problem,
    find_loss_problem,
    find_overlong_problem,
    find_quantization_problem,
    get_first,
    get_tuner,
)
from finetune_convert.formats.swift_trainer import convert_for_trainer, select_swift_rules
from finetune_convert.job_draft import JobDraft
from finetune_convert.mapping.arguments import list_option_names, parse_arguments
from finetune_convert.mapping.program import build_program_job
from finetune_convert.mapping.rules import Options, find_program_reasons, list_unknown
from finetune_convert.mapping.tool_input import (
    ToolInput,
    build_name,
    choose_form,
    explain_program,
    find_device_reasons,
    start_draft,
)
from finetune_convert.mapping.trainer_conversion import TrainerConversion
from finetune_convert.option_table import OptionTable, choose_version, load_table
from finetune_convert.shell.words import ADDED, Word

VERSIONS = (2, 3, 4)
TRAINING_COMMANDS = ("sft", "pt", "rlhf", "dpo", "orpo", "simpo")
METHOD_COMMANDS = ("dpo", "orpo", "simpo")  # of early 2.x releases: rlhf with a method


def convert_swift(source: ToolInput, subcommand: str, words: Sequence[Word]) -> tuple[str, JobDraft]:
    """Return a description of the input and the job. words: the arguments after the subcommand.

    Raises: ConversionError if the input is not a valid command
    """
    table, note = _choose_table(source, words)
    version = table.name.rpartition("-")[2]
    command = "rlhf" if subcommand in METHOD_COMMANDS else subcommand
    given, entries = parse_arguments(words, table)
    options = Options(table, command, given)
    source.entries += [note, *entries]
    method = subcommand if subcommand in METHOD_COMMANDS else str(options.get("rlhf_type") or "dpo")
    description = f"ms-swift {version}.x: swift {subcommand}" + (f" ({method})" if command == "rlhf" else "")
    reasons = [*_list_reasons(options, method), *find_device_reasons(source)]
    is_possible = command != "rlhf" or method == "dpo"
    form = choose_form(source.request, reasons, is_possible=is_possible, what=f"this trainer has no {method}")
    model = str(get_first(options, MODEL) or options.get("model_type") or "model")
    name = build_name(model, method if command == "rlhf" else subcommand)
    if form is not JobForm.TRAINER:
        source.entries += list_unknown(options, f"ms-swift {version}.x")
        return description, _build_command_job(source, name, reasons, subcommand, words)
    draft, is_full = start_draft(source, name), get_tuner(options) == "full"
    tool = f"ms-swift {version}.x"
    convert_for_trainer(TrainerConversion(source, options, draft, tool, is_full=is_full, is_dpo=command == "rlhf"))
    return description, draft


def _choose_table(source: ToolInput, words: Sequence[Word]) -> tuple[OptionTable, Entry]:
    tables = [load_table(f"swift-{version}") for version in VERSIONS]
    requested = source.request.tool_version
    if requested is not None:
        if requested not in VERSIONS:
            raise ConversionError(f"--tool-version: ms-swift has the versions 2, 3 and 4, found {requested}")
        table = tables[VERSIONS.index(requested)]
        return table, Entry("version", EntryEffect.NOTE, f"defaults are those of {_describe(table)}, as requested")
    names = list_option_names(words)
    if "model_type" in names and not {"model", "model_id_or_path"} & set(names):
        tables = tables[:1]  # later versions need the model itself
    table, deciding = choose_version(tables, names)
    deciding = deciding or (("model_type without model",) if len(tables) == 1 else ())
    reason = f"because of {', '.join(deciding[:3])}" if deciding else "the newest, because the options fit all versions"
    message = f"defaults are those of {_describe(table)}, {reason}; change it with --tool-version"
    return table, Entry("version", EntryEffect.NOTE, message)


def _describe(table: OptionTable) -> str:
    return f"ms-swift {table.generated.partition('ms-swift==')[2].partition(',')[0]}"


def _list_reasons(options: Options, method: str) -> list[str]:
    """Return why the original program is needed."""
    found = find_program_reasons(options, select_swift_rules(options))
    reasons = [f"{given.name}: {reason}" for given, reason in found]
    tuner = get_tuner(options)
    if tuner not in ("lora", "full"):
        reasons.append(f"tuner {tuner}: this trainer has LoRA and full fine-tuning")
    if options.command == "rlhf" and method != "dpo":
        reasons.append(f"rlhf_type {method}: this trainer has sft and dpo")
    checks = (
        find_loss_problem,
        find_dpo_loss_problem if method == "dpo" else find_deepspeed_problem,
        find_quantization_problem,
        find_overlong_problem,
        find_deepspeed_problem,
    )
    return list(dict.fromkeys([*reasons, *(reason for check in checks if (reason := check(options)))]))


def _build_command_job(
    source: ToolInput, name: str, reasons: Sequence[str], subcommand: str, words: Sequence[Word]
) -> JobDraft:
    """Return a job that runs swift, which starts the ranks of its node itself."""
    explain_program(source, reasons)
    line = source.launch.program[0].line
    arguments = list(words)
    if not {"output_dir", "output-dir"} & set(list_option_names(words)):
        arguments += [Word("--output_dir", ADDED), Word("output", ADDED)]
    source.launch.program = (Word("swift", line), Word(subcommand, line), *arguments)
    ranks_fill_devices, source.launch.launcher = bool(source.launch.launcher), ""
    return build_program_job(source, name=name, image="ms-swift", ranks_fill_devices=ranks_fill_devices)
