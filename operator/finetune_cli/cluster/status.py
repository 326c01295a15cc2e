"""Command `finetune status`, which describes a job of the cluster."""

from datetime import UTC, datetime
from typing import Annotated

import typer

from finetune_api.visible_text import escape_controls
from finetune_cli.cluster.options import (
    ContextOption,
    JobArgument,
    KubeconfigOption,
    NamespaceOption,
    OutputFormat,
    OutputOption,
    render_document,
)
from finetune_cli.describe_job import format_job
from finetune_cli.terminal import open_console
from finetune_client.client import Client
from finetune_client.job import Job


def status(
    name: JobArgument,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Print again at every change, until the job ends.")
    ] = False,
    output: OutputOption = OutputFormat.TEXT,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
) -> None:
    """Describe a job: phase, progress, attempts, nodes and output."""
    with Client(namespace=namespace, context=context, kubeconfig=kubeconfig) as client:
        if watch:
            _watch_job(client, name, output)
        else:
            print(_render(client.get(name), output))


def _render(job: Job, output: OutputFormat) -> str:
    if output is OutputFormat.TEXT:
        return format_job(job, now=datetime.now(UTC))
    return job.name if output is OutputFormat.NAME else render_document(job.body, output)


def _watch_job(client: Client, name: str, output: OutputFormat) -> None:
    from rich.live import Live
    from rich.text import Text

    console = open_console()
    if output is not OutputFormat.TEXT or not console.is_terminal:
        for job in client.watch(name):
            print(_render(job, output), flush=True)
        return
    with Live(Text(""), console=console, auto_refresh=False) as live:
        for job in client.watch(name):
            live.update(Text(escape_controls(_render(job, output))), refresh=True)
