"""Command `finetune run`, which runs a job on the local host with processes instead of pods."""

import asyncio
import importlib.util
import os
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finetune_cli.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, BadInput
from finetune_cli.interrupts import list_end_signals
from finetune_cli.job_file import FileArgument, JobFile, NamespaceOption, read_job_file

if TYPE_CHECKING:
    from finetune_api.v1alpha1.job import FineTuneJob, FineTuneJobSpec
    from finetune_cli.local.cluster import LocalCluster, LocalResources
    from finetune_cli.local.runner import LocalRunner
    from finetune_cli.local.state_store import StateStore
    from finetune_cli.progress_display import ProgressDisplay

VolumeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--volume", metavar="NAME=DIR", help="Folder that stands in for a volume of the job.", show_default=False
    ),
]


@dataclass(frozen=True)
class RunOptions:
    """Command line options of `finetune run`."""

    output: Path
    show_logs: bool
    start_over: bool
    trusts_file: bool


def run(  # noqa: PLR0913  each flag is a parameter
    file: FileArgument,
    volume: VolumeOption = None,
    output: Annotated[Path, typer.Option(help="Folder that stands in for the output claim.")] = Path("output"),
    namespace: NamespaceOption = None,
    logs: Annotated[bool, typer.Option("--logs", help="Show the log lines of the nodes, too.")] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over and replace the output of an earlier run.")
    ] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="Let the env of the job choose code, and servers that receive your tokens.")
    ] = False,
) -> None:
    """Run a job on this machine. Ctrl-C saves a checkpoint and stops; running the same command again resumes.

    Exit code 0: complete; 1: failed; 2: the job file or the command line is not valid; 130: stopped.
    """
    job_file = read_job_file(file, namespace=namespace)
    check_packages(job_file.job.spec)
    sys.exit(_prepare_and_run(job_file, volume or [], RunOptions(output.absolute(), logs, fresh, trust)))


def check_packages(spec: "FineTuneJobSpec") -> None:
    """Raise BadInput if a required package is missing. Packages of a custom command are not checked.

    Packages are not imported, because importing torch takes seconds.
    """
    required = ("finetune_trainer",) if spec.command else ("finetune_trainer", "torch", "transformers")
    missing = [package for package in required if not importlib.util.find_spec(package)]
    if missing:
        raise BadInput(f"{', '.join(missing)} cannot be imported; pip install 'finetune-operator[cli,trainer]'")


def _prepare_and_run(job_file: JobFile, volumes: list[str], options: RunOptions) -> int:
    from finetune_cli.local.cluster import LocalResources
    from finetune_cli.local.environment import check_environment
    from finetune_cli.local.gpus import divide_gpus, find_gpus
    from finetune_cli.local.state_store import StateStore
    from finetune_cli.local.volume_mapping import LocalMount, map_job_paths, parse_volumes
    from finetune_cli.progress_display import ProgressDisplay
    from finetune_cli.terminal import open_console
    from finetune_operator import names

    # Check the job, the volumes, the environment and the GPUs before starting any process.
    spec = job_file.job.spec
    if spec.suspend:
        raise BadInput(f"{job_file.path}: spec.suspend: true would wait forever; leave it out to run the job here")
    mounts = parse_volumes(volumes, spec)
    local_spec = map_job_paths(job_file, (*mounts, LocalMount(names.OUTPUT_DIR, options.output)))["spec"]
    check_environment(spec, os.environ)
    environment, destinations = _limit_environment(spec, trusts_file=options.trusts_file)
    gpus = divide_gpus(find_gpus(os.environ), spec)
    resources = LocalResources(options.output, mounts, gpus, environment, hides_credential_files=bool(destinations))
    with (
        closing(StateStore(_get_state_folder(get_job_output(job_file, options.output)))) as store,
        ProgressDisplay(open_console()) as display,
    ):
        # Resume the state of an earlier run of the same job, or start a new job.
        changed_fields = () if options.start_over else store.find_changed_fields(job_file)
        body = store.open_job(job_file, start_over=options.start_over)
        if changed_fields:
            display.print_line(
                f"this is not the job of the last run: {', '.join(changed_fields)} changed; it is a new job"
            )
        if body["status"].get("completionTime"):
            display.print_line(
                f"Complete already; {_describe_result_location(job_file, options)} (--fresh replaces it)"
            )
            return EXIT_OK
        _print_run_summary(display, job_file, gpus, destinations=destinations)
        if options.start_over and spec.output and not spec.command:
            local_spec = {**local_spec, "output": {**local_spec["output"], "overwrite": True}}
        # Run the job until it ends or is suspended, and report the outcome.
        job = asyncio.run(
            _run_job({**body, "spec": local_spec}, resources, store, display, show_logs=options.show_logs)
        )
        return _report_outcome(display, job, job_file, options)


def _limit_environment(spec: "FineTuneJobSpec", *, trusts_file: bool) -> tuple[Mapping[str, str], tuple[str, ...]]:
    """Return the variables that the nodes inherit, and the names of those of the job that choose other servers."""
    from finetune_cli.local.trust import SAFE_PATH, find_destinations, withhold_credentials

    if spec.command is not None:  # it is code of the job's author
        return os.environ, ()
    destinations = () if trusts_file else find_destinations(spec, os.environ)
    inherited = withhold_credentials(spec, os.environ) if destinations else os.environ
    return {**inherited, **SAFE_PATH}, destinations


async def _run_job(
    body: dict[str, object],
    resources: "LocalResources",
    store: "StateStore",
    display: "ProgressDisplay",
    *,
    show_logs: bool,
) -> "FineTuneJob":
    from finetune_cli.local.cluster import LocalCluster
    from finetune_cli.local.console_logs import ConsoleLogs
    from finetune_cli.local.runner import LocalRunner

    runner = LocalRunner(body, display)
    cluster = LocalCluster(resources, store, runner.children, on_event=display.print_event)
    _stop_on_signals(runner, cluster)
    if not show_logs:
        return await runner.run(cluster)
    console_logs = ConsoleLogs(store.folder, print_line=display.print_log)
    follow_task = asyncio.create_task(console_logs.follow())
    try:
        return await runner.run(cluster)
    finally:
        follow_task.cancel()
        console_logs.print_new_lines()


def _stop_on_signals(runner: "LocalRunner", cluster: "LocalCluster") -> None:
    loop = asyncio.get_running_loop()
    for signal_number in list_end_signals():
        loop.add_signal_handler(signal_number, runner.stop, cluster)


def get_job_output(job_file: JobFile, output: Path) -> Path:
    """Return the folder for checkpoints, result and logs of the job."""
    metadata, output_spec = job_file.job.metadata, job_file.job.spec.output
    return output / ((output_spec and output_spec.sub_path) or f"{metadata.namespace}/{metadata.name}")


def _get_state_folder(output: Path) -> Path:
    return output.with_name(f"{output.name}.local")


def _describe_result_location(job_file: JobFile, options: RunOptions) -> str:
    output = get_job_output(job_file, options.output)
    if job_file.job.spec.command is None:
        return f"the result is in {_format_path(output / 'result')}"
    if job_file.job.spec.output is None:
        return f"the logs are in {_format_path(_get_state_folder(output))}"
    return f"what the command wrote to FINETUNE_OUTPUT is in {_format_path(output)}"


def _format_path(path: Path) -> str:
    """Return the path as text, relative to the working directory if the path is inside it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _print_run_summary(
    display: "ProgressDisplay", job_file: JobFile, gpus: tuple[tuple[str, ...], ...], *, destinations: tuple[str, ...]
) -> None:
    from finetune_operator.plan.run_plan import describe_batch

    spec = job_file.job.spec
    devices = (
        "; ".join(f"node {node}: GPU {','.join(node_gpus)}" for node, node_gpus in enumerate(gpus) if node_gpus)
        or "CPU"
    )
    display.print_line(
        f"{job_file.job.metadata.name}: {spec.num_nodes} x {spec.ranks_per_node} processes on this machine, {devices}"
    )
    if spec.command is not None:
        display.print_line(f"{spec.command}")
        display.print_line(
            f"local mode: it runs in the environment of this machine ({sys.executable}), not in {spec.image}"
        )
    else:
        display.print_line(f"effective batch {describe_batch(spec)} (per device x accumulation x ranks)")
    display.print_line("local mode: resources, image and placement of the job are not enforced")
    if destinations:
        display.print_line(
            f"local mode: spec.env chooses other servers ({', '.join(destinations)}), so your tokens and passwords are"
            " withheld; --trust sends them"
        )


def _report_outcome(display: "ProgressDisplay", job: "FineTuneJob", job_file: JobFile, options: RunOptions) -> int:
    status, record = job.status, job.status.attempts[-1] if job.status.attempts else None
    progress = status.progress
    restarts = f", {status.restarts} restart{'s' if status.restarts > 1 else ''}" if status.restarts else ""
    if status.completion_time is None:
        resume_hint = (
            f"resumes from {progress.last_checkpoint}" if progress and progress.last_checkpoint else "starts over"
        )
        resume_hint = "starts the command again" if job_file.job.spec.command else resume_hint
        display.print_line(f"Suspended: the same command again {resume_hint}")
        return EXIT_INTERRUPTED
    if any(condition.type == "Complete" and condition.status == "True" for condition in status.conditions):
        steps = f"{progress.step} steps, loss {progress.loss:.4g}" if progress and progress.loss is not None else "done"
        early_end = f"; {progress.ended}" if progress and progress.ended else ""
        display.print_line(f"Complete: {steps}{restarts}{early_end}; {_describe_result_location(job_file, options)}")
        return EXIT_OK
    assert record is not None, "a failed job has a failed attempt"
    output = get_job_output(job_file, options.output)
    logs = (output / "logs" if job_file.job.spec.output else _get_state_folder(output)) / f"attempt-{record.attempt}"
    display.print_line(f"Failed: {record.reason}: {record.message}{restarts}")
    if logs.is_dir():
        display.print_line(f"the logs are in {_format_path(logs)}")
    return EXIT_FAILED
