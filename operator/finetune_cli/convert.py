"""Command `finetune convert`, which prints a job for a command or config of another training tool."""

import sys
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from finetune_api.v1alpha1.name_types import is_object_name
from finetune_cli.errors import BadInput
from finetune_convert.conversion import (
    MAX_INPUT_BYTES,
    NOT_TAKEN_OVER,
    ConversionError,
    ConversionRequest,
    InputKind,
    JobForm,
    VolumeMount,
)
from finetune_convert.render import render_json, render_summary, render_yaml

EXIT_NOT_TAKEN_OVER = 1
STDIN = "-"


class ConvertFormat(StrEnum):
    """Output formats of the command `finetune convert`."""

    YAML = "yaml"
    SUMMARY = "summary"
    JSON = "json"


def convert(  # noqa: PLR0913 (each parameter is a flag)
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="File with the command or config; - reads standard input.")
    ],
    source: Annotated[
        InputKind | None, typer.Option("--from", help="Kind of the input (default: detected).", show_default=False)
    ] = None,
    tool_version: Annotated[
        int | None,
        typer.Option(
            help="Major version of ms-swift: 2, 3 or 4 (default: detected by the options).", show_default=False
        ),
    ] = None,
    form: Annotated[
        JobForm | None,
        typer.Option(
            help="Run this project's trainer, or the original program as command (default: the trainer, if it has all"
            " that the input uses).",
            show_default=False,
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the job.", show_default=False)] = None,
    image: Annotated[str | None, typer.Option(help="Image with the original program.", show_default=False)] = None,
    output_claim: Annotated[
        str | None, typer.Option(help="PersistentVolumeClaim for checkpoints and the result.", show_default=False)
    ] = None,
    volume: Annotated[
        list[str] | None,
        typer.Option(metavar="CLAIM:/PATH", help="Mount a claim with data or models; repeatable.", show_default=False),
    ] = None,
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=SOURCE", help="Path or Hub id of a dataset of the input; repeatable.", show_default=False
        ),
    ] = None,
    gpu_resource: Annotated[str, typer.Option(help="Resource name of the GPUs.")] = "nvidia.com/gpu",
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs per node.", show_default=False)] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of nodes.", show_default=False)] = None,
    rows: Annotated[
        int | None,
        typer.Option(min=1, help="Number of training rows, to convert ratios and epochs to steps.", show_default=False),
    ] = None,
    output: Annotated[
        ConvertFormat, typer.Option("--output", "-o", help="What to print on stdout.")
    ] = ConvertFormat.YAML,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with code 1 if an option with an effect was not taken over.")
    ] = False,
) -> None:
    """Print a FineTuneJob for a command or config of another tool.

    The tools are ms-swift, LLaMA-Factory, axolotl, torchrun, accelerate, deepspeed and Kubeflow. The job is printed on
    stdout, and on stderr each option that has another value or is not taken over, with the reason. The input is parsed
    and never executed. Exit code 2 if it cannot be converted.
    """
    from finetune_convert.convert import convert as convert_text  # other commands do not need its parser, tree-sitter

    request = ConversionRequest(
        source=source,
        tool_version=tool_version,
        form=form,
        name=name,
        image=image,
        output_claim=output_claim,
        volumes=tuple(_parse_volumes(volume or ())),
        datasets=dict(_parse_datasets(dataset or ())),
        gpu_resource=gpu_resource,
        gpus=gpus,
        nodes=nodes,
        rows=rows,
    )
    try:
        conversion = convert_text(_read_input(file), request)
    except ConversionError as error:
        raise BadInput(*(f"{file}: {problem}" for problem in error.problems)) from error
    match output:
        case ConvertFormat.JSON:
            print(render_json(conversion))
        case ConvertFormat.SUMMARY:
            print(render_summary(conversion))
        case ConvertFormat.YAML:
            print(render_yaml(conversion), end="")
            print(render_summary(conversion), file=sys.stderr)
    if strict and conversion.select(*NOT_TAKEN_OVER):
        sys.exit(EXIT_NOT_TAKEN_OVER)


def _read_input(file: str) -> str:
    """Return the text of a file or of standard input, reading at most one byte more than is allowed."""
    try:
        if file == STDIN:
            content = sys.stdin.buffer.read(MAX_INPUT_BYTES + 1)
        else:
            with Path(file).open("rb") as stream:
                content = stream.read(MAX_INPUT_BYTES + 1)
        return content.decode("utf-8")
    except OSError as error:
        raise BadInput(f"{file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{file}: is not UTF-8 text") from error


def _parse_volumes(texts: Iterable[str]) -> Iterable[VolumeMount]:
    for text in texts:
        claim, separator, path = text.partition(":")
        if not separator or not is_object_name(claim) or not path.startswith("/"):
            raise BadInput(f"--volume: {text}: expected CLAIM:/PATH, such as datasets:/data")
        yield VolumeMount(claim, path.rstrip("/") or "/")


def _parse_datasets(texts: Iterable[str]) -> Iterable[tuple[str, str]]:
    for text in texts:
        name, separator, source = text.partition("=")
        if not separator or not name or not source:
            raise BadInput(f"--dataset: {text}: expected NAME=SOURCE, such as alpaca_en=/data/alpaca_en.json")
        yield name, source
