"""Command `finetune mcp`, which serves jobs to an agent by the Model Context Protocol."""

from importlib.util import find_spec
from typing import Annotated

import typer

from finetune_cli.cluster.options import ContextOption, KubeconfigOption, NamespaceOption
from finetune_cli.errors import BadInput
from finetune_cli.interrupts import end_on_signals


def mcp(
    allow_changes: Annotated[
        bool,
        typer.Option("--allow-changes", help="Also offer tools that create, suspend, resume, cancel and delete jobs."),
    ] = False,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
) -> None:
    """Serve the jobs of a namespace to an agent (MCP).

    It uses standard input and output. Without --allow-changes its tools only read. Tools that change a job return a
    preview first, and act when its confirmation is passed back.
    """
    if find_spec("mcp") is None:
        raise BadInput("the package mcp is not installed; pip install 'finetune-operator[cli,mcp]'")
    from finetune_mcp.server import run_server

    end_on_signals()  # a thread that reads standard input cannot be interrupted
    run_server(namespace=namespace, context=context, kubeconfig=kubeconfig, allow_changes=allow_changes)
