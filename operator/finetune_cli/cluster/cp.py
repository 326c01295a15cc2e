"""Command `finetune cp`, which copies files of a job's output to this machine."""

from pathlib import Path
from typing import Annotated

import typer

from finetune_cli.cluster.options import ContextOption, KubeconfigOption, NamespaceOption
from finetune_client.client import Client
from finetune_client.output_files import RESULT


def cp(
    source: Annotated[
        str,
        typer.Argument(metavar="JOB[:PATH]", help="Job and path in its output (default: result).", show_default=False),
    ],
    destination: Annotated[Path, typer.Argument(help="New file or folder on this machine.", show_default=False)],
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
) -> None:
    """Copy the result or other files of a job to this machine.

    Examples: `finetune cp first ./adapter`, `finetune cp first:checkpoints/step-00000100 ./checkpoint`. If no pod of
    the job runs, a restricted pod reads the output; that needs the rights to create pods and pods/exec.
    """
    name, _, path = source.partition(":")
    with Client(namespace=namespace, context=context, kubeconfig=kubeconfig) as client:
        print(client.download(name, destination, path=path or RESULT))
