"""Command `finetune estimate`, which forecasts the GPU and host memory that a job needs."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from finetune_api.v1alpha1.methods import METHODS
from finetune_cli.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_OK, BadInput
from finetune_cli.job_file import FileArgument, JobFile, NamespaceOption, read_job_file
from finetune_cli.run import VolumeOption, check_packages
from finetune_cli.terminal import open_console
from finetune_operator.observation.ownership import RawBody

ForecastJson = dict[str, Any]  # output of `python -m finetune_trainer.memory`

GIB = 2**30

GpuOption = Annotated[
    str | None,
    typer.Option("--gpu", metavar="NAME", help="GPU to fit, such as a100-80g or l4-24g.", show_default=False),
]


def estimate(
    file: FileArgument, gpu: GpuOption = None, volume: VolumeOption = None, namespace: NamespaceOption = None
) -> None:
    """Forecast the memory of a job from its model's config; no weights, no GPU and no cluster are needed.

    Exit code 0: it fits, or no limit was given; 1: it does not fit, or the Hub did not answer; 2: the job file or the
    command line is not valid.
    """
    from finetune_cli.local.volume_mapping import map_model_path, parse_volumes

    job_file = read_job_file(file, namespace=namespace)
    if job_file.job.spec.command is not None:
        raise BadInput(f"{file}: spec.command: the memory of a custom program cannot be forecast; measure it")
    check_packages(job_file.job.spec)
    mounts = parse_volumes(volume or [], job_file.job.spec)
    forecast = _run_forecast(map_model_path(job_file, mounts), gpu)
    _print_forecast(job_file, forecast)
    lines = format_verdicts(forecast, host_limit_bytes=_get_host_limit_bytes(job_file))
    print("\n".join(line for line, _ in lines))
    sys.exit(EXIT_OK if all(fits for _, fits in lines) else EXIT_FAILED)


def _run_forecast(spec: RawBody, gpu: str | None) -> ForecastJson:
    """Run the trainer's forecast in a subprocess, so that the CLI never imports torch."""
    flags = ["--gpu", gpu] if gpu is not None else []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spec.json"
        path.write_text(json.dumps(spec, default=str), encoding="utf-8")
        process = subprocess.run(
            [sys.executable, "-P", "-m", "finetune_trainer.memory", str(path), *flags],
            env={**os.environ, "PYTHONWARNINGS": "ignore", "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    if process.returncode == EXIT_BAD_INPUT:
        raise BadInput(*process.stderr.strip().splitlines()[-1:])
    if process.returncode:
        print(process.stderr.strip(), file=sys.stderr)
        sys.exit(EXIT_FAILED)
    forecast: ForecastJson = json.loads(process.stdout)
    return forecast


def _print_forecast(job_file: JobFile, forecast: ForecastJson) -> None:
    from rich.table import Table

    spec = job_file.job.spec
    method = next(name for name in METHODS if getattr(spec, name) is not None)  # a valid spec has exactly one method
    tuning = f"lora r={spec.lora.r}" if spec.lora else "full"
    assert spec.model is not None  # model is optional only with spec.command
    print(f"{job_file.job.metadata.name}: {method} ({tuning}) of {spec.model.name}")
    print(f"parameters {forecast['parameters']:,}, of which {forecast['trainedParameters']:,} are trained")
    print(
        f"batch {forecast['batch']} (per device x accumulation x ranks), samples of up to {forecast['length']} tokens"
    )
    if forecast["auto"]:
        print(f"perDeviceTrainBatchSize auto: {_describe_auto_batch_size(forecast)}")
    rank_title = "each rank, on its GPU" if forecast["onGpu"] else "each rank, in host memory"
    for title, parts in ((rank_title, forecast["rank"]), ("each node, in host memory", forecast["node"])):
        table = Table(title, "GiB", box=None, pad_edge=False)
        table.columns[1].justify = "right"
        for name, size in parts["parts"].items():
            table.add_row(name, f"{size / GIB:.2f}")
        table.add_row("total", f"{parts['total'] / GIB:.2f}", style="bold")
        print()
        open_console().print(table)
    print()


def _describe_auto_batch_size(forecast: ForecastJson) -> str:
    gpu = forecast.get("gpu")
    if gpu is None:
        return "the forecast is for one sample at a time; --gpu NAME shows how many fit"
    return f"{forecast['perDevice']} is the most that fits" if gpu["fits"] else "not even one sample at a time fits"


def format_verdicts(forecast: ForecastJson, *, host_limit_bytes: int | None) -> list[tuple[str, bool]]:
    """Return for each memory limit a line of text and whether the job fits."""
    lines = [_format_gpu_verdict(forecast)] if forecast["onGpu"] else []
    needed_bytes = forecast["node"]["total"]
    if host_limit_bytes is not None:
        fits = needed_bytes <= host_limit_bytes
        result = "fits" if fits else "does not fit; raise"
        limit = f"resources.limits.memory of {_format_gib(host_limit_bytes)}"
        lines.append((f"host memory: {_format_gib(needed_bytes)} {result} {limit}", fits))
    return lines


def _format_gpu_verdict(forecast: ForecastJson) -> tuple[str, bool]:
    total = forecast["rank"]["total"]
    gpu, suggestion = forecast.get("gpu"), forecast.get("suggestion")
    if gpu is None:
        return f"fits on: {', '.join(forecast['fitsOn']) or 'no GPU known; --gpu NAME suggests what to change'}", True
    usage = f"{_format_gib(total)} of {_format_gib(gpu['usable'])}"
    if gpu["fits"]:
        return f"{gpu['name']}: fits, {usage} ({total / gpu['usable']:.0%})", True
    if suggestion is None:
        return f"{gpu['name']}: does not fit, {usage}; no change of batch, length or method makes it fit", False
    changes = ", ".join(suggestion["changes"])
    return f"{gpu['name']}: does not fit, {usage}; {_format_gib(suggestion['total'])} with {changes}", False


def _format_gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB"


def _get_host_limit_bytes(job_file: JobFile) -> int | None:
    from finetune_api.v1alpha1.quantity import parse_quantity

    limit = job_file.job.spec.resources.limits.get("memory")
    return None if limit is None else int(parse_quantity(limit))
