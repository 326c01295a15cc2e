"""Finds the training command in a shell text and converts it by its tool."""

import re
from collections.abc import Sequence

from finetune_convert.conversion import ConversionError, ConversionRequest, Entry, EntryEffect, InputKind
from finetune_convert.formats.axolotl import convert_axolotl_command
from finetune_convert.formats.llamafactory import convert_llamafactory_command
from finetune_convert.formats.swift import TRAINING_COMMANDS, convert_swift
from finetune_convert.job_draft import JobDraft
from finetune_convert.launch.launchers import Launch, unwrap
from finetune_convert.launch.topology import merge_node_commands
from finetune_convert.mapping.program import build_program_job
from finetune_convert.mapping.tool_input import ToolInput, build_name
from finetune_convert.shell.commands import ShellCommand, ShellScript, read_script
from finetune_convert.shell.words import Word

_SWIFT_SCRIPT = re.compile(r"(?:^|/)(?:swift/cli/(sft|pt|rlhf)|llm_(sft|pt|rlhf)|_?(sft|rlhf|pt))\.py$")
_SWIFT_MODULE = re.compile(r"swift\.cli\.(sft|pt|rlhf)$")
_PYTHON = re.compile(r"(^|/)python[\d.]*$")
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "swift", "megatron", "llamafactory-cli", "lmf", "axolotl")


def convert_shell(text: str, request: ConversionRequest, *, tool: InputKind | None) -> tuple[str, JobDraft]:
    """Return a description of the input and the job.

    Raises: ConversionError if the text contains no training command, or several
    """
    script = read_script(text)
    training = [command for command in script.commands if is_training(command)]
    if script.problems and not training:
        raise ConversionError(*script.problems)
    if not training:
        raise ConversionError(_explain_missing(script))
    command, count = merge_node_commands(training)
    entries = [*script.entries, *(Entry("statement", EntryEffect.CHANGED, problem) for problem in script.problems)]
    entries += [_describe_other(other) for other in script.commands if other not in training]
    if count > 1:
        entries.append(
            Entry(
                "nodes",
                EntryEffect.MAPPED,
                f"{count} commands that differ only in their rank are {count} nodes",
                "numNodes",
            )
        )
    launch = unwrap(command.words)
    source = ToolInput(request, launch, command.environment, command.directory, count, entries)
    return _convert_command(source, tool)


def is_training(command: ShellCommand) -> bool:
    """Return whether a command starts a training; installing, downloading and inference do not."""
    texts = [word.text for word in command.words]
    name = texts[0].rpartition("/")[2]
    match name:
        case "swift" | "megatron":
            return len(texts) > 1 and texts[1] in TRAINING_COMMANDS
        case "llamafactory-cli" | "lmf" | "axolotl":
            return len(texts) > 1 and texts[1] == "train"
        case "accelerate":
            return texts[1:2] == ["launch"]
        case "torchrun" | "deepspeed":
            return True
        case _ if _PYTHON.search(texts[0]):
            return any(text.endswith(".py") for text in texts[1:4]) or (texts[1:2] == ["-m"] and texts[2:3] != ["pip"])
    return False


def _explain_missing(script: ShellScript) -> str:
    found = [command.words[0].text for command in script.commands]
    if any(name.startswith("-") for name in found):
        line = next(command.line for command in script.commands if command.words[0].text.startswith("-"))
        return f"line {line}: a command begins with an option; the line before it must end with a backslash"
    names = f"; found {', '.join(found[:5])}" if found else ""
    return (
        f"the text contains no training command{names}; expected {', '.join(_LAUNCHERS)} or python"
        " (swift with sft, pt or rlhf; llamafactory-cli and axolotl with train)"
    )


def _describe_other(command: ShellCommand) -> Entry:
    text = " ".join(word.text for word in command.words[:2])[:60]  # the rest may contain a secret
    if command.words[0].text.startswith("-"):
        message = (
            "a command begins with an option; the line before it must end with a backslash, and its options are lost"
        )
        return Entry(text, EntryEffect.CHANGED, message, line=command.line)
    return Entry(text, EntryEffect.UNUSED, "is not run; it does not start the training", line=command.line)


def _convert_command(source: ToolInput, tool: InputKind | None) -> tuple[str, JobDraft]:
    program = source.launch.program
    name = program[0].text.rpartition("/")[2]
    if tool in (None, InputKind.SWIFT):
        if name == "swift":
            return convert_swift(source, program[1].text, program[2:])
        subcommand, rest = _find_swift_script(source.launch)
        if subcommand:
            return convert_swift(source, subcommand, rest)
    if tool is InputKind.SWIFT:
        raise ConversionError(f"--from swift: expected swift sft, pt or rlhf, found {name}")
    if tool in (None, InputKind.LLAMAFACTORY) and (result := _convert_llamafactory(source, name)):
        return result
    if tool in (None, InputKind.AXOLOTL) and (words := _find_axolotl_config(source.launch)):
        return convert_axolotl_command(source, words)
    if tool is InputKind.LLAMAFACTORY:
        raise ConversionError(f"--from llamafactory: expected llamafactory-cli train or a YAML, found {name}")
    return _convert_program(source)


def _drop_python(launch: Launch) -> tuple[Word, ...]:
    """Return the words of the program without the Python interpreter."""
    return launch.program[1:] if _PYTHON.search(launch.program[0].text) else launch.program


def _find_swift_script(launch: Launch) -> tuple[str, tuple[Word, ...]]:
    """Return the subcommand of a script or module of ms-swift, and its arguments; empty for another program."""
    program = _drop_python(launch)
    texts = [word.text for word in program]
    if texts[:1] == ["-m"] and len(texts) > 1 and (match := _SWIFT_MODULE.search(texts[1])):
        return match[1], program[2:]
    if launch.is_module and (match := _SWIFT_MODULE.search(texts[0])):
        return match[1], program[1:]
    if texts and ("swift" in texts[0] or "llm_" in texts[0]) and (match := _SWIFT_SCRIPT.search(texts[0])):
        return match[1] or match[2] or match[3], program[1:]
    return "", ()


def _find_axolotl_config(launch: Launch) -> tuple[Word, ...]:
    """Return the config file of axolotl and its overrides; empty for another program."""
    program = _drop_python(launch)
    texts = [word.text for word in program]
    if texts[:2] in (["axolotl", "train"], ["-m", "axolotl.cli.train"]):
        return program[2:]
    return program[1:] if launch.is_module and texts[:1] == ["axolotl.cli.train"] else ()


def _convert_llamafactory(source: ToolInput, name: str) -> tuple[str, JobDraft] | None:
    program = _drop_python(source.launch)
    if name in ("llamafactory-cli", "lmf"):
        return convert_llamafactory_command(source, program[2:])
    is_script = bool(program) and program[0].text.endswith(
        ("src/train.py", "src/train_bash.py", "llamafactory/launcher.py")
    )
    has_stage = any(word.text.partition("=")[0] == "--stage" for word in program)
    return convert_llamafactory_command(source, program[1:]) if is_script and has_stage else None


def _convert_program(source: ToolInput) -> tuple[str, JobDraft]:
    launch = source.launch
    texts = [word.text for word in launch.program]
    if launch.launcher:
        name, image = texts[0].rpartition(".py")[0] or texts[0], launch.launcher
        description = f"{launch.launcher}: {texts[0]}"
    else:
        script = _find_script(texts)
        name, image, description = script.removesuffix(".py"), texts[0].rpartition("/")[2], f"command: {script}"
    image = {"torchrun": "pytorch", "accelerate": "pytorch", "deepspeed": "deepspeed", "megatron": "ms-swift"}.get(
        image, build_name(image)
    )
    draft = build_program_job(
        source, name=build_name(name.replace(".", "-")), image=image, ranks_fill_devices=bool(launch.launcher)
    )
    return description, draft


def _find_script(texts: Sequence[str]) -> str:
    """Return the script or module of a Python command, otherwise the program with its subcommand."""
    if _PYTHON.search(texts[0]):
        if texts[1:2] == ["-m"] and len(texts) > 2:
            return texts[2].rpartition(".")[2]
        return next((text for text in texts[1:] if text.endswith(".py")), "train")
    return "-".join(texts[:2])
