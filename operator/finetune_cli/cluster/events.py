"""Command `finetune events`, which lists the events about a job and its pods."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from finetune_cli.cluster.options import (
    ContextOption,
    JobArgument,
    KubeconfigOption,
    NamespaceOption,
    OutputFormat,
    OutputOption,
    render_document,
)
from finetune_client.client import Client
from finetune_client.job_events import JobEvent


def events(
    name: JobArgument,
    warnings: Annotated[bool, typer.Option("--warnings", help="Only events of the type Warning.")] = False,
    output: OutputOption = OutputFormat.TEXT,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
) -> None:
    """List the events about a job and its pods. The API server keeps events for an hour."""
    with Client(namespace=namespace, context=context, kubeconfig=kubeconfig) as client:
        found = [event for event in client.list_events(name) if not warnings or event.type == "Warning"]
    if output is OutputFormat.TEXT:
        print("\n".join(format_event(event) for event in found))
    else:
        print(render_document(json.loads(json.dumps([asdict(event) for event in found], default=str)), output))


def format_event(event: JobEvent) -> str:
    """Return an event in one line."""
    times = f" (x{event.count})" if event.count > 1 else ""
    return f"{event.time:%Y-%m-%d %H:%M:%S}  {event.type:<7}  {event.about}  {event.reason}: {event.message}{times}"
