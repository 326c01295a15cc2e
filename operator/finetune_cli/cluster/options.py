"""Options that the cluster commands share: the cluster, the namespace and the output format."""

from enum import StrEnum
from typing import Annotated, Any

import typer

from finetune_api.visible_text import render_json
from finetune_api.yaml_documents import dump_yaml

NamespaceOption = Annotated[
    str | None,
    typer.Option("--namespace", "-n", help="Namespace (default: the context's).", show_default=False),
]
ContextOption = Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig.", show_default=False)]
KubeconfigOption = Annotated[
    str | None, typer.Option("--kubeconfig", help="The kubeconfig (default: as for kubectl).", show_default=False)
]


def complete_job_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names of jobs that begin with this text; nothing without access to the cluster."""
    from finetune_client.client import Client
    from finetune_client.errors import ClientError

    target = {name: ctx.params.get(name) for name in ("namespace", "context", "kubeconfig")}
    try:
        with Client(**target) as client:
            return [job.name for job in client.list() if job.name.startswith(incomplete)]
    except ClientError:
        return []


JobArgument = Annotated[
    str,
    typer.Argument(metavar="JOB", help="Name of the job.", show_default=False, autocompletion=complete_job_names),
]


class OutputFormat(StrEnum):
    """Formats of commands that print jobs."""

    TEXT = "text"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


OutputOption = Annotated[OutputFormat, typer.Option("--output", "-o", help="Format of the output.")]


def render_document(document: Any, output: OutputFormat) -> str:
    """Return a Kubernetes object or list as JSON or YAML."""
    if output is OutputFormat.JSON:
        return render_json(document, indent=2)
    return dump_yaml(document).rstrip("\n")
