"""Parses commands and configs with the argument parser of one tool, and writes which it accepts.

It runs with the Python of that tool's environment, which contains none of our packages. Nothing is trained,
downloaded or executed.

Usage: tool_parser.py PARSER CALLS RESULTS, both JSON files. A call is a list of arguments, or a config; its result
is the error of the parser, or "".
"""

import contextlib
import importlib
import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Call = list[str] | dict[str, Any]
SWIFT_CLASSES = {
    "swift-2": ("swift.llm", {"sft": "SftArguments", "pt": "PtArguments", "rlhf": "RLHFArguments"}),
    "swift-3": ("swift.llm", {"sft": "TrainArguments", "pt": "TrainArguments", "rlhf": "RLHFArguments"}),
    "swift-4": ("swift.arguments", {"sft": "SftArguments", "pt": "PretrainArguments", "rlhf": "RLHFArguments"}),
}


class NotAccepted(Exception):
    """Raised if a parser returns arguments that its program would reject."""


def main(parser: str, calls: Path, results: Path) -> None:
    """Parse all calls and write the errors in their order."""
    results.write_text(json.dumps([find_error(PARSERS[parser], call) for call in json.loads(calls.read_text())]))


def find_error(parse: Callable[[Any], object], call: Call) -> str:
    """Return the error of a parser in one line, or "" if it accepts the call."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(io.StringIO()):
            parse(call)
    except SystemExit as error:
        return f"exit code {error.code}: {' '.join(output.getvalue().rpartition('error:')[2].split())[:300]}"
    except Exception as error:  # every error of a parser is a result
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return ""


def parse_swift(version: str) -> Callable[[list[str]], object]:
    """Return the parser of a major version of ms-swift; the first argument is the command.

    The class is built without its `__post_init__`, which downloads the config of the model.
    """
    module, classes = SWIFT_CLASSES[version]

    def parse(arguments: list[str]) -> object:
        command, *rest = arguments
        arguments_class = getattr(importlib.import_module(module), classes[command])
        arguments_class.__post_init__ = lambda self: None
        parsed, unknown = importlib.import_module("swift.utils").parse_args(arguments_class, rest)
        if unknown and not parsed.ignore_args_error:
            raise NotAccepted(f"remaining_argv: {unknown}")
        return parsed

    return parse


def parse_llamafactory(call: Call) -> object:
    """Parse and validate a config or arguments of LLaMA-Factory.

    DeepSpeed is left out, because its config file is not part of the call, and the CPU is used.
    """
    get_train_args = importlib.import_module("llamafactory.hparams.parser").get_train_args
    if isinstance(call, dict):
        return get_train_args({**{key: call[key] for key in call if key != "deepspeed"}, "use_cpu": True})
    if "--deepspeed" in call:
        index = call.index("--deepspeed")
        call = call[:index] + call[index + 2 :]
    return get_train_args([*call, "--use_cpu", "true"])


def parse_axolotl(call: Call) -> object:
    """Validate a config of axolotl by its schema, or parse the arguments of `axolotl train`.

    axolotl ignores unknown keys and options; here they are errors.
    """
    if isinstance(call, list):
        Path(call[0]).parent.mkdir(parents=True, exist_ok=True)
        Path(call[0]).touch()  # the parser requires the file and does not read it
        context = importlib.import_module("axolotl.cli.main").train.make_context("train", list(call))
        unknown = context.args
    else:
        config_module = importlib.import_module("axolotl.utils.config")
        config = importlib.import_module("axolotl.utils.dict").DictDefault(call)
        config_module.prepare_plugins(config)
        config_module.validate_config(config)
        fields = importlib.import_module("axolotl.utils.schemas.config").AxolotlInputConfig.model_fields
        unknown = sorted(call.keys() - fields.keys() - {field.validation_alias for field in fields.values()})
    if unknown:
        raise NotAccepted(f"unknown: {unknown}")
    return call


def parse_torchrun(arguments: Sequence[str]) -> object:
    """Parse the arguments of torchrun, with the script and its arguments."""
    return importlib.import_module("torch.distributed.run").parse_args(list(arguments))


def parse_torch_launch(arguments: Sequence[str]) -> object:
    """Parse the arguments of `python -m torch.distributed.launch`, with the script and its arguments."""
    return importlib.import_module("torch.distributed.launch").parse_args(list(arguments))


def parse_accelerate(arguments: Sequence[str]) -> object:
    """Parse the arguments of `accelerate launch`, with the script and its arguments."""
    return importlib.import_module("accelerate.commands.launch").launch_command_parser().parse_args(list(arguments))


def parse_deepspeed(arguments: Sequence[str]) -> object:
    """Parse the arguments of deepspeed, with the script and its arguments."""
    return importlib.import_module("deepspeed.launcher.runner").parse_args(list(arguments))


PARSERS: dict[str, Callable[[Any], object]] = {
    **{version: parse_swift(version) for version in SWIFT_CLASSES},
    "llamafactory": parse_llamafactory,
    "axolotl": parse_axolotl,
    "torchrun": parse_torchrun,
    "torch.distributed.launch": parse_torch_launch,
    "accelerate": parse_accelerate,
    "deepspeed": parse_deepspeed,
}


if __name__ == "__main__":
    name, calls_path, results_path = sys.argv[1:]
    main(name, Path(calls_path), Path(results_path))
