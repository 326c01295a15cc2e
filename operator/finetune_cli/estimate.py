"""`finetune estimate`: what a job will need of GPU and host memory, before any of it is used."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from finetune_api.v1alpha1.job import METHODS
from finetune_cli.errors import BAD_INPUT, BadInput
from finetune_cli.job_file import FileArgument, JobFile, NamespaceOption, read_job_file
from finetune_cli.run import VolumeOption, check_packages

Raw = dict[str, Any]

FITS, FAILED = 0, 1
GIB = 2**30

GpuOption = Annotated[
    str | None,
    typer.Option("--gpu", metavar="NAME", help="GPU to fit, such as a100-80g or l4-24g.", show_default=False),
]


def estimate(
    file: FileArgument, gpu: GpuOption = None, volume: VolumeOption = None, namespace: NamespaceOption = None
) -> None:
    """Forecast the memory of a job from its model's config; no weights, no GPU and no cluster are needed.

    Exit code 0: it fits, or nothing was asked; 1: it does not fit, or the Hub did not answer; 2: something in the job
    file or on the command line is wrong.
    """
    from finetune_cli.local.volume_mapping import localise_model, parse_volumes

    job_file = read_job_file(file, namespace=namespace)
    if job_file.job.spec.command is not None:
        raise BadInput(f"{file}: spec.command: what a program of your own needs cannot be forecast; measure it")
    check_packages(job_file.job.spec)
    mounts = parse_volumes(volume or [], job_file.job.spec)
    found = _forecast(localise_model(job_file, mounts), gpu)
    _print(job_file, found)
    lines = verdict(found, host_limit=_host_limit(job_file))
    print("\n".join(line for line, _ in lines))
    sys.exit(FITS if all(good for _, good in lines) else FAILED)


def _forecast(spec: Raw, gpu: str | None) -> Raw:
    """The trainer's own, from a process of its own: torch is loaded nowhere else."""
    asked = ["--gpu", gpu] if gpu is not None else []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spec.json"
        path.write_text(json.dumps(spec, default=str), encoding="utf-8")
        answer = subprocess.run(
            [sys.executable, "-m", "finetune_trainer.memory", str(path), *asked],
            env={**os.environ, "PYTHONWARNINGS": "ignore", "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    if answer.returncode == BAD_INPUT:
        raise BadInput(*answer.stderr.strip().splitlines()[-1:])
    if answer.returncode:
        print(answer.stderr.strip(), file=sys.stderr)
        sys.exit(FAILED)
    found: Raw = json.loads(answer.stdout)
    return found


def _print(file: JobFile, found: Raw) -> None:
    from rich.console import Console
    from rich.table import Table

    spec = file.job.spec
    method = next(name for name in METHODS if getattr(spec, name) is not None)  # the spec has exactly one
    how = f"lora r={spec.lora.r}" if spec.lora else "full"
    assert spec.model is not None  # only a command goes without
    print(f"{file.job.metadata.name}: {method} ({how}) of {spec.model.name}")
    print(f"parameters {found['parameters']:,}, of which {found['trainedParameters']:,} are trained")
    print(f"batch {found['batch']} (per device x accumulation x ranks), samples of up to {found['length']} tokens")
    if found["auto"]:
        print(f"perDeviceTrainBatchSize auto: {_auto(found)}")
    where = "each rank, on its GPU" if found["onGpu"] else "each rank, in host memory"
    for title, parts in ((where, found["rank"]), ("each node, in host memory", found["node"])):
        table = Table(title, "GiB", box=None, pad_edge=False)
        table.columns[1].justify = "right"
        for name, size in parts["parts"].items():
            table.add_row(name, f"{size / GIB:.2f}")
        table.add_row("total", f"{parts['total'] / GIB:.2f}", style="bold")
        print()
        Console(highlight=False).print(table)
    print()


def _auto(found: Raw) -> str:
    gpu = found.get("gpu")
    if gpu is None:
        return "one sample at a time is forecast; --gpu NAME tells how many fit"
    return f"{found['perDevice']} is the most that fits" if gpu["fits"] else "not even one sample at a time fits"


def verdict(found: Raw, *, host_limit: int | None) -> list[tuple[str, bool]]:
    """What follows, line by line, and whether each is good news."""
    lines = [_of_gpu(found)] if found["onGpu"] else []
    needed = found["node"]["total"]
    if host_limit is not None:
        fits = needed <= host_limit
        said = "fits" if fits else "does not fit; raise"
        lines.append((f"host memory: {_gib(needed)} {said} resources.limits.memory of {_gib(host_limit)}", fits))
    return lines


def _of_gpu(found: Raw) -> tuple[str, bool]:
    total = found["rank"]["total"]
    gpu, better = found.get("gpu"), found.get("suggestion")
    if gpu is None:
        return f"fits on: {', '.join(found['fitsOn']) or 'no GPU known; --gpu NAME suggests what to change'}", True
    share = f"{_gib(total)} of {_gib(gpu['usable'])}"
    if gpu["fits"]:
        return f"{gpu['name']}: fits, {share} ({total / gpu['usable']:.0%})", True
    if better is None:
        return f"{gpu['name']}: does not fit, {share}; no change of batch, length or method makes it fit", False
    changes = ", ".join(better["changes"])
    return f"{gpu['name']}: does not fit, {share}; {_gib(better['total'])} with {changes}", False


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def _host_limit(file: JobFile) -> int | None:
    from finetune_api.v1alpha1.quantity import parse_quantity

    limit = file.job.spec.resources.limits.get("memory")
    return None if limit is None else int(parse_quantity(limit))
