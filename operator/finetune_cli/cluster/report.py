"""Command `finetune report`, which opens the report of a job in the browser."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from finetune_cli.cluster.options import ContextOption, JobArgument, KubeconfigOption, NamespaceOption
from finetune_client.client import Client

REPORT = "result/report.html"


def report(
    name: JobArgument,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write (default: JOB-report.html).", show_default=False),
    ] = None,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the file in the browser.")] = True,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
) -> None:
    """Open the report of a complete job: curves, memory, environment."""
    path = output or Path(f"{name}-report.html")
    with Client(namespace=namespace, context=context, kubeconfig=kubeconfig) as client:
        written = client.download(name, path, path=REPORT)
    print(written)
    if browser:
        webbrowser.open(written.absolute().as_uri())
