"""Command `finetune cp`, which copies files of a job's output to this machine."""

from pathlib import Path
from typing import Annotated

import typer

from finetune_cli.cluster.options import ContextOption, KubeconfigOption, NamespaceOption
from finetune_client.client import Client
from finetune_client.output_files import RESULT
from finetune_client.tar_archive import CopyLimits

GIB = 2**30
REMEDY = "; raise the limit with --max-entries or --max-size"


def cp(  # noqa: PLR0913  each flag is a parameter
    source: Annotated[
        str,
        typer.Argument(metavar="JOB[:PATH]", help="Job and path in its output (default: result).", show_default=False),
    ],
    destination: Annotated[Path, typer.Argument(help="New file or folder on this machine.", show_default=False)],
    max_size: Annotated[int, typer.Option(metavar="GIB", help="Largest size of the copy in GiB.", min=1)] = 1024,
    max_entries: Annotated[int, typer.Option(help="Largest number of files, folders and links.", min=1)] = 100_000,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
) -> None:
    """Copy the result or other files of a job to this machine.

    Examples: `finetune cp first ./adapter`, `finetune cp first:checkpoints/step-00000100 ./checkpoint`. If no pod of
    the job runs, a restricted pod reads the output; that needs the rights to create pods and pods/exec.
    """
    name, _, path = source.partition(":")
    limits = CopyLimits(max_size * GIB, max_entries, REMEDY)
    with Client(namespace=namespace, context=context, kubeconfig=kubeconfig) as client:
        print(client.download(name, destination, path=path or RESULT, limits=limits))
