"""Command `finetune status`, which describes jobs of a cluster."""

import time
from datetime import UTC, datetime
from typing import Annotated

import typer

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_cli.cluster_access import ClusterAccess, ContextOption, KubeconfigOption, NamespaceOption
from finetune_cli.describe_job import format_job, format_job_table

WATCH_SECONDS = 2.0

JobNameArgument = Annotated[
    str | None, typer.Argument(help="Name of the job; without it, all jobs are listed.", show_default=False)
]


def status(
    name: JobNameArgument = None,
    namespace: NamespaceOption = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Print again at every change, until the job ends.")
    ] = False,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
) -> None:
    """Describe a job of the cluster: phase, progress, attempts and their reasons, nodes, output."""
    access = ClusterAccess(namespace, context=context, kubeconfig=kubeconfig)
    if not watch:
        print(_format_jobs(_read_jobs(access, name), name))
        return
    try:
        _watch_jobs(access, name)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def _read_jobs(access: ClusterAccess, name: str | None) -> list[FineTuneJob]:
    return [FineTuneJob.parse(body) for body in ([access.get_job(name)] if name else access.list_jobs())]


def _format_jobs(jobs: list[FineTuneJob], name: str | None) -> str:
    now = datetime.now(UTC)
    return format_job(jobs[0], now=now) if name else format_job_table(jobs, now=now)


def _watch_jobs(access: ClusterAccess, name: str | None) -> None:
    """Print the jobs after every change until all of them have ended.

    Polls every two seconds; the operator updates progress every ten seconds.
    """
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)
    printed: list[FineTuneJob] = []
    with Live(Text(""), console=console, auto_refresh=False) as live:
        while True:
            jobs = _read_jobs(access, name)
            if console.is_terminal:
                live.update(Text(_format_jobs(jobs, name)), refresh=True)
            elif [job.status for job in jobs] != [job.status for job in printed]:
                console.print(_format_jobs(jobs, name), markup=False, soft_wrap=True)
            printed = jobs
            if jobs and all(job.status.completion_time for job in jobs):
                return
            time.sleep(WATCH_SECONDS)
