"""Builds jobs that run the original program in an image of the user: spec.command."""

import re
from collections.abc import Sequence

from finetune_convert.conversion import ConversionError, EntryEffect, JobForm
from finetune_convert.data_paths import DataPaths, is_path
from finetune_convert.job_draft import JobDraft
from finetune_convert.launch.launchers import Launch
from finetune_convert.mapping.tool_input import ToolInput, place_on_nodes, start_draft
from finetune_convert.secret_values import is_secret, name_variable
from finetune_convert.shell.words import ADDED, Word

MAX_ARGUMENTS, MAX_ARGUMENT_LENGTH = 512, 8192
OUTPUT = "$(FINETUNE_OUTPUT)"
OUTPUT_OPTIONS = ("output_dir", "save_dir", "output", "save_path", "out_dir", "save")
ACCELERATE = [
    "accelerate",
    "launch",
    "--num_machines",
    "$(NNODES)",
    "--machine_rank",
    "$(NODE_RANK)",
    "--num_processes",
    "$(FINETUNE_WORLD_SIZE)",
    "--main_process_ip",
    "$(MASTER_ADDR)",
    "--main_process_port",
    "$(MASTER_PORT)",
]


def build_program_job(source: ToolInput, *, name: str, image: str, ranks_fill_devices: bool = True) -> JobDraft:
    """Return a job that runs the program of the launch with all its arguments.

    image: name of the image that is assumed without --image
    """
    if source.request.form is JobForm.TRAINER:
        raise ConversionError("--form trainer: this program can only run as a command; remove --form")
    draft = start_draft(source, name)
    launch = source.launch
    topology = place_on_nodes(draft, source, for_trainer=False, ranks_fill_devices=ranks_fill_devices)
    if topology.ranks_per_node != topology.devices:
        draft.set("nprocPerNode", topology.ranks_per_node)
        message = f"{topology.devices} devices for {topology.ranks_per_node} ranks of each node, as in the input"
        draft.note("nprocPerNode", EntryEffect.NOTE, message, field="nprocPerNode")
    draft.set("image", source.request.image or f"registry.example/{image}:latest")
    if source.request.image is None:
        message = f"registry.example/{image}:latest does not exist; name an image with the program with --image"
        draft.note("image", EntryEffect.EDIT, message, field="image")
    paths = DataPaths(draft)
    draft.spec["command"] = _build_command(launch, draft, paths)
    if source.directory is not None:
        _add_directory(draft, source.directory)
    draft.add_output()
    paths.add_volumes()
    return draft


def _add_directory(draft: JobDraft, directory: Word) -> None:
    if directory.unresolved or not directory.text.startswith("/"):
        message = f"{directory.text} is relative or unknown; set command.workingDir to a folder of the image"
        draft.note("cd", EntryEffect.EDIT, message, field="command.workingDir", line=directory.line)
        return
    draft.set("command.workingDir", directory.text)
    draft.note(
        "cd", EntryEffect.MAPPED, "must be a folder of the image", field="command.workingDir", line=directory.line
    )


def _build_command(launch: Launch, draft: JobDraft, paths: DataPaths) -> dict[str, object]:
    program, *rest = launch.program
    arguments = convert_arguments(rest, draft, paths)
    if not any(OUTPUT in argument for argument in arguments):
        message = f"no option for the output folder was recognised; files outside of {OUTPUT} are lost with the pod"
        draft.note("output folder", EntryEffect.EDIT, message, field="command")
    _check_resolved(program)
    is_script = launch.launcher and not launch.is_module and program.text.endswith(".py") and not launch.kept_options
    if is_script:
        _note_program(draft, program, "command.script")
        return {"script": program.text, **({"args": arguments} if arguments else {})}
    for value in launch.kept_options:
        if is_path(value):
            message = f"{value} must exist in the image, or on a volume"
            draft.note(value, EntryEffect.EDIT, message, field="command.exec")
    prefix: list[str] = []
    if launch.launcher == "accelerate":
        prefix = [*ACCELERATE, *launch.kept_options, *(["--module"] if launch.is_module else [])]
    elif launch.launcher:
        prefix = ["torchrun", *(["-m"] if launch.is_module else [])]
    _note_program(draft, program, "command.exec")
    return {"exec": [*prefix, program.text, *arguments]}


def _note_program(draft: JobDraft, program: Word, path: str) -> None:
    draft.note(program.text, EntryEffect.TAKEN, "", field=path, line=program.line)


def convert_arguments(words: Sequence[Word], draft: JobDraft, paths: DataPaths) -> list[str]:
    """Return the arguments of a program: secrets become variables, and outputs the output folder of the job.

    Raises: ConversionError if there are too many arguments
    """
    arguments: list[str] = []
    name = ""
    for word in words:
        option, equals, attached = word.text.partition("=") if word.text.startswith("-") else ("", "", word.text)
        name = option or name
        value = attached if equals or not option else None
        if value is None:
            arguments.append(_escape(option))
            draft.note(option, EntryEffect.TAKEN, "", field="command", line=word.line)
            continue
        converted = _convert_value(name, value, word, draft, paths)
        arguments.append(f"{option}={converted}" if equals else converted)
        if converted.startswith("$("):
            name = ""  # an output folder or a secret has one value
    if len(arguments) > MAX_ARGUMENTS - 20:
        raise ConversionError(f"the command has {len(arguments)} arguments; at most {MAX_ARGUMENTS - 20} are possible")
    if any(len(argument) > MAX_ARGUMENT_LENGTH for argument in arguments):
        raise ConversionError(f"an argument has more than {MAX_ARGUMENT_LENGTH} characters; put it into a file")
    return arguments


def _convert_value(name: str, value: str, word: Word, draft: JobDraft, paths: DataPaths) -> str:
    key = name.lstrip("-").replace("-", "_")
    if name and is_secret(name, value):
        variable = name_variable(name)
        draft.add_secret(name, variable, line=word.line)
        return f"$({variable})"
    if key in OUTPUT_OPTIONS:
        message = "is added with" if word.line == ADDED else f"{value} is"
        draft.note(name, EntryEffect.MAPPED, f"{message} the output folder of the job", field="command", line=word.line)
        return OUTPUT
    _check_resolved(word)
    if re.match(r"(/|~/)", value) and not _is_mounted(value, paths):
        message = f"{value} must exist in the image, or on a volume: add it with --volume CLAIM:/path"
        draft.note(name or value, EntryEffect.EDIT, message, field="volumes", line=word.line)
    elif is_path(value) and not value.startswith("/") and "://" not in value:
        message = f"{value} is relative to the working directory; it must exist in the image, or on a volume"
        draft.note(name or value, EntryEffect.EDIT, message, field="command", line=word.line)
    return _escape(value)


def _check_resolved(word: Word) -> None:
    if word.unresolved:
        raise ConversionError(
            f"line {word.line}: {word.unresolved} is only known to a shell; replace it with its value"
        )


def _is_mounted(path: str, paths: DataPaths) -> bool:
    return any(path == m.mount_path or path.startswith(m.mount_path.rstrip("/") + "/") for m in paths.mounts)


def _escape(text: str) -> str:
    """Escape $(NAME), which the operator would replace, but not the output folder."""
    return re.sub(r"\$(?=\((?!FINETUNE_OUTPUT\))\w+\))", "$$", text)
