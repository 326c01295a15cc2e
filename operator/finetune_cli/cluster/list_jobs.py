"""Command `finetune list`, which lists the jobs of a namespace or of the cluster."""

from datetime import UTC, datetime
from typing import Annotated

import typer

from finetune_cli.cluster.options import (
    ContextOption,
    KubeconfigOption,
    NamespaceOption,
    OutputFormat,
    OutputOption,
    render_document,
)
from finetune_cli.describe_job import format_job_table
from finetune_client.client import Client


def list_jobs(
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="List the jobs of all namespaces.")
    ] = False,
    selector: Annotated[
        str, typer.Option("--selector", "-l", help="Label selector, such as team=vision.", show_default=False)
    ] = "",
    output: OutputOption = OutputFormat.TEXT,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
) -> None:
    """List the jobs of a namespace."""
    with Client(namespace=namespace, context=context, kubeconfig=kubeconfig) as client:
        jobs = client.list(all_namespaces=all_namespaces, selector=selector)
    if output is OutputFormat.TEXT:
        print(format_job_table(jobs, now=datetime.now(UTC), show_namespace=all_namespaces))
    elif output is OutputFormat.NAME:
        print("\n".join(job.name for job in jobs))
    else:
        document = {"apiVersion": "v1", "kind": "List", "items": [job.body for job in jobs]}
        print(render_document(document, output))
