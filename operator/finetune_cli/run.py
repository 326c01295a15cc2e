"""`finetune run`: the job on this machine, with processes instead of pods."""

import asyncio
import importlib.util
import os
import signal
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finetune_cli.errors import BadInput
from finetune_cli.job_file import FileArgument, JobFile, NamespaceOption, read_job_file

if TYPE_CHECKING:
    from finetune_api.v1alpha1.job import FineTuneJob, FineTuneJobSpec
    from finetune_cli.local.cluster import LocalCluster, Machine
    from finetune_cli.local.progress_display import Screen
    from finetune_cli.local.runner import Drive
    from finetune_cli.local.state_store import Record

COMPLETE, FAILED, INTERRUPTED = 0, 1, 130

VolumeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--volume", metavar="NAME=DIR", help="Folder that stands in for a volume of the job.", show_default=False
    ),
]


@dataclass(frozen=True)
class Wishes:
    """What the command line says beside the job file."""

    output: Path
    logs: bool
    fresh: bool


def run(
    file: FileArgument,
    volume: VolumeOption = None,
    output: Annotated[Path, typer.Option(help="Folder that stands in for the output claim.")] = Path("output"),
    namespace: NamespaceOption = None,
    logs: Annotated[bool, typer.Option("--logs", help="Show the nodes' own lines, too.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over and replace what an earlier run left.")] = False,
) -> None:
    """Run a job on this machine. Ctrl-C saves a checkpoint and stops; the same command again continues.

    Exit code 0: complete; 1: failed; 2: something in the job file or on the command line is wrong; 130: stopped.
    """
    job_file = read_job_file(file, namespace=namespace)
    check_packages(job_file.job.spec)
    sys.exit(_run(job_file, volume or [], Wishes(output.absolute(), logs, fresh)))


def check_packages(spec: "FineTuneJobSpec") -> None:
    """Raises BadInput. Asked of the import system, because importing torch takes seconds.

    What a command needs is its own affair.
    """
    needed = ("finetune_trainer",) if spec.command else ("finetune_trainer", "torch", "transformers")
    missing = [package for package in needed if not importlib.util.find_spec(package)]
    if missing:
        raise BadInput(f"{', '.join(missing)} cannot be imported; pip install 'finetune-operator[cli,trainer]'")


def _run(file: JobFile, volumes: list[str], wishes: Wishes) -> int:
    from rich.console import Console

    from finetune_cli.local.cluster import Machine
    from finetune_cli.local.environment import check_environment
    from finetune_cli.local.gpus import divide_gpus, find_gpus
    from finetune_cli.local.progress_display import Screen
    from finetune_cli.local.state_store import Record
    from finetune_cli.local.volume_mapping import Mount, localise, parse_volumes
    from finetune_operator import names

    spec = file.job.spec
    if spec.suspend:
        raise BadInput(f"{file.path}: spec.suspend: true would wait for ever; leave it out to run the job here")
    mounts = parse_volumes(volumes, spec)
    localised = localise(file, (*mounts, Mount(names.OUTPUT_DIR, wishes.output)))["spec"]
    check_environment(spec, os.environ)
    gpus = divide_gpus(find_gpus(os.environ), spec)
    machine = Machine(wishes.output, mounts, gpus)
    with (
        closing(Record(_beside(job_output(file, wishes.output)))) as record,
        Screen(Console(highlight=False)) as screen,
    ):
        changed = () if wishes.fresh else record.changes(file)
        body = record.begin(file, fresh=wishes.fresh)
        if changed:
            screen.say(f"another job than the last one here: {', '.join(changed)} changed")
        if body["status"].get("completionTime"):
            screen.say(f"Complete already; {_where_it_is(file, wishes)} (--fresh starts over)")
            return COMPLETE
        _introduce(screen, file, gpus)
        if wishes.fresh and spec.output and not spec.command:
            localised = {**localised, "output": {**localised["output"], "overwrite": True}}
        job = asyncio.run(_drive({**body, "spec": localised}, machine, record, screen, logs=wishes.logs))
        return _tell_end(screen, job, file, wishes)


async def _drive(
    body: dict[str, object], machine: "Machine", record: "Record", screen: "Screen", *, logs: bool
) -> "FineTuneJob":
    from finetune_cli.local.cluster import LocalCluster
    from finetune_cli.local.console_logs import ConsoleLogs
    from finetune_cli.local.runner import Drive

    drive = Drive(body, screen)
    cluster = LocalCluster(machine, record, drive.children, on_event=screen.event)
    _stop_on_signals(drive, cluster)
    if not logs:
        return await drive.run(cluster)
    console_logs = ConsoleLogs(record.folder, say=screen.say)
    following = asyncio.create_task(console_logs.follow())
    try:
        return await drive.run(cluster)
    finally:
        following.cancel()
        console_logs.print_new()


def _stop_on_signals(drive: "Drive", cluster: "LocalCluster") -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, drive.stop, cluster)


def job_output(file: JobFile, output: Path) -> Path:
    """Folder of the job's checkpoints, result and logs."""
    metadata, asked = file.job.metadata, file.job.spec.output
    return output / ((asked and asked.sub_path) or f"{metadata.namespace}/{metadata.name}")


def _beside(output: Path) -> Path:
    return output.with_name(f"{output.name}.local")


def _where_it_is(file: JobFile, wishes: Wishes) -> str:
    output = job_output(file, wishes.output)
    if file.job.spec.command is None:
        return f"the result is in {_short(output / 'result')}"
    if file.job.spec.output is None:
        return f"the logs are in {_short(_beside(output))}"
    return f"what the command wrote to FINETUNE_OUTPUT is in {_short(output)}"


def _short(path: Path) -> str:
    """As a person in this folder would write it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _introduce(screen: "Screen", file: JobFile, gpus: tuple[tuple[str, ...], ...]) -> None:
    from finetune_operator.plan.run_plan import describe_batch

    spec = file.job.spec
    devices = "; ".join(f"node {node}: GPU {','.join(share)}" for node, share in enumerate(gpus) if share) or "CPU"
    screen.say(
        f"{file.job.metadata.name}: {spec.num_nodes} x {spec.ranks_per_node} processes on this machine, {devices}"
    )
    if spec.command is not None:
        screen.say(f"{spec.command}")
        screen.say(f"local mode: it runs with what this machine has ({sys.executable}), not in {spec.image}")
    else:
        screen.say(f"effective batch {describe_batch(spec)} (per device x accumulation x ranks)")
    screen.say("local mode: resources, image and placement of the job are not enforced")


def _tell_end(screen: "Screen", job: "FineTuneJob", file: JobFile, wishes: Wishes) -> int:
    status, record = job.status, job.status.attempts[-1] if job.status.attempts else None
    progress = status.progress
    restarts = f", {status.restarts} restart{'s' if status.restarts > 1 else ''}" if status.restarts else ""
    if status.completion_time is None:
        saved = f"resumes from {progress.last_checkpoint}" if progress and progress.last_checkpoint else "starts over"
        saved = "starts the command again" if file.job.spec.command else saved
        screen.say(f"Suspended: the same command again {saved}")
        return INTERRUPTED
    if any(condition.type == "Complete" and condition.status == "True" for condition in status.conditions):
        steps = f"{progress.step} steps, loss {progress.loss:.4g}" if progress and progress.loss is not None else "done"
        how = f"; {progress.ended}" if progress and progress.ended else ""
        screen.say(f"Complete: {steps}{restarts}{how}; {_where_it_is(file, wishes)}")
        return COMPLETE
    assert record is not None, "a job that failed has an attempt that failed"
    output = job_output(file, wishes.output)
    logs = (output / "logs" if file.job.spec.output else _beside(output)) / f"attempt-{record.attempt}"
    screen.say(f"Failed: {record.reason}: {record.message}{restarts}")
    if logs.is_dir():
        screen.say(f"the logs are in {_short(logs)}")
    return FAILED
