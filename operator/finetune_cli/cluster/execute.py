"""Command `finetune exec`, which runs a program in a pod of a job by `kubectl exec`."""

import os
import shutil
import sys
from typing import Annotated

import typer

from finetune_cli.cluster.options import ContextOption, JobArgument, KubeconfigOption, NamespaceOption
from finetune_cli.errors import BadInput
from finetune_client.client import Client
from finetune_client.job_logs import LogSelection, choose_attempt, choose_nodes
from finetune_operator import names


def execute(
    name: JobArgument,
    program: Annotated[list[str], typer.Argument(metavar="-- PROGRAM [ARGS]...", help="Program with its arguments.")],
    node: Annotated[int, typer.Option(help="Node rank.", min=0)] = 0,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
) -> None:
    """Run a program in a pod of a job, such as `finetune exec first --node 1 -- nvidia-smi`.

    On a terminal the program is interactive. kubectl has to be installed.
    """
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise BadInput("kubectl is not on the PATH; finetune exec uses it")
    with Client(namespace=namespace, context=context, kubeconfig=kubeconfig) as client:
        job = client.get(name)
    selection = LogSelection(nodes=(node,))
    pod = names.pod_name(name, choose_attempt(job, selection), choose_nodes(job, selection)[0])
    flags = [f"--namespace={job.namespace}", f"--container={names.CONTAINER}"]
    flags += [f"--context={context}"] if context else []
    flags += [f"--kubeconfig={kubeconfig}"] if kubeconfig else []
    flags += ["--stdin", "--tty"] if sys.stdin.isatty() and sys.stdout.isatty() else ["--stdin"]
    os.execv(kubectl, [kubectl, "exec", pod, *flags, "--", *program])  # noqa: S606  the program is not run by a shell
