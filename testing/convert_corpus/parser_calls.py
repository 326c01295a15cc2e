"""Splits the inputs of the conversion corpus into calls of the argument parsers of their tools."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune_convert.conversion import ConversionRequest
from finetune_convert.convert import convert
from finetune_convert.detect import find_mapping
from finetune_convert.launch.launchers import unwrap
from finetune_convert.launch.topology import merge_node_commands
from finetune_convert.shell.commands import read_script
from finetune_convert.shell_input import is_training

REJECTED = {  # inputs that are wrong on purpose
    "swift3-unknown-options.sh": "a misspelt option, and a word without an option",
}
NOT_PARSED = {
    "llamafactory-cli-yaml.sh": "the config that it names is not part of the input",
    "minimind-plain-python.sh": "the parser belongs to the script of the user",
    "swift3-megatron.sh": "the parser needs Megatron-Core",
    "kubeflow-pytorchjob-queue.yaml": "a manifest is checked by an API server",
    "kubeflow-pytorchjob-shell.yaml": "a manifest is checked by an API server",
    "kubeflow-pytorchjob.yaml": "a manifest is checked by an API server",
    "kubeflow-trainjob.yaml": "a manifest is checked by an API server",
}
_LAUNCHERS = {
    ("torchrun",): "torchrun",
    ("accelerate", "launch"): "accelerate",
    ("deepspeed",): "deepspeed",
    ("python", "-m", "torch.distributed.run"): "torchrun",
    ("python3", "-m", "torch.distributed.launch"): "torch.distributed.launch",
}
_SWIFT_SOURCE = re.compile(r"ms-swift (\d)\.x: swift (\w+)")


@dataclass(frozen=True)
class ParserCall:
    """One call of a parser: the arguments or the config of an input."""

    input: str
    parser: str  # key of tool_parser.PARSERS
    content: list[str] | dict[str, Any]


def list_calls(path: Path) -> tuple[ParserCall, ...]:
    """Return the calls for the launcher and for the tool of an input; none if its tool has no parser."""
    text = path.read_text()
    if path.name in NOT_PARSED:
        return ()
    if path.suffix in (".yml", ".yaml"):
        (config,) = find_mapping(text) or [{}]
        return (ParserCall(path.name, path.name.partition("-")[0], config),)
    training = [command for command in read_script(text).commands if is_training(command)]
    words = merge_node_commands(training)[0].words
    program = [word.text for word in unwrap(words).program]
    calls = [
        *_list_launcher_calls([word.text for word in words]),
        *_list_tool_calls(program, convert(text, ConversionRequest()).source),
    ]
    return tuple(ParserCall(path.name, parser, arguments) for parser, arguments in calls)


def _list_launcher_calls(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    for prefix, parser in _LAUNCHERS.items():
        if tuple(words[: len(prefix)]) == prefix:
            yield parser, list(words[len(prefix) :])


def _list_tool_calls(program: Sequence[str], source: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the call of the tool that `convert` detected, in the version that it detected."""
    if match := _SWIFT_SOURCE.match(source):
        rest = program[2:] if program[0] == "swift" else program[1:]
        yield f"swift-{match[1]}", [match[2], *rest]
    elif program[:2] == ["llamafactory-cli", "train"] or program[0] == "src/train.py":
        yield "llamafactory", list(program[1 if program[0] == "src/train.py" else 2 :])
    elif program[:2] == ["axolotl", "train"]:
        yield "axolotl", list(program[2:])
