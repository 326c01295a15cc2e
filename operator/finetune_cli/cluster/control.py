"""Commands `finetune suspend`, `resume`, `cancel` and `delete`."""

from typing import Annotated

import typer

from finetune_cli.cluster.options import ContextOption, JobArgument, KubeconfigOption, NamespaceOption
from finetune_cli.cluster.wait import wait_for
from finetune_client.async_client import WaitTarget
from finetune_client.client import Client

WaitOption = Annotated[bool, typer.Option("--wait", help="Return once it has happened.")]
TimeoutOption = Annotated[
    float | None, typer.Option(help="Seconds after which --wait fails.", metavar="SECONDS", show_default=False)
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


def suspend(
    name: JobArgument,
    wait: WaitOption = False,
    timeout: TimeoutOption = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
) -> None:
    """Save a checkpoint and release all pods of a job."""
    with Client(namespace=namespace, context=context, kubeconfig=kubeconfig) as client:
        client.suspend(name)
        if wait:
            wait_for(client, name, WaitTarget.SUSPENDED, timeout)
        print(f"{name} {'suspended' if wait else 'is being suspended'}")


def resume(
    name: JobArgument,
    wait: WaitOption = False,
    timeout: TimeoutOption = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
) -> None:
    """Continue a suspended job from its last checkpoint."""
    with Client(namespace=namespace, context=context, kubeconfig=kubeconfig) as client:
        client.resume(name)
        if wait:
            wait_for(client, name, WaitTarget.RUNNING, timeout)
        print(f"{name} {'runs' if wait else 'is being resumed'}")


def cancel(  # noqa: PLR0913  each flag is a parameter
    name: JobArgument,
    yes: YesOption = False,
    wait: WaitOption = False,
    timeout: TimeoutOption = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
) -> None:
    """End a job for good, after a checkpoint; its record is kept.

    The pods are deleted and the job fails with the reason Cancelled; its output is kept. It cannot be resumed: use
    suspend for a pause.
    """
    with Client(namespace=namespace, context=context, kubeconfig=kubeconfig) as client:
        job = client.get(name)
        if not yes and not job.is_finished:
            typer.confirm(f"{job.namespace}/{name} is {job.phase or 'new'}; end it for good?", abort=True)
        client.cancel(name)
        if wait:
            job = client.wait(name, timeout_seconds=timeout)
        print(f"{name} is {job.phase}" if job.is_finished else f"{name} is being cancelled")


def delete(
    name: JobArgument,
    yes: YesOption = False,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
) -> None:
    """Delete a job and its pods; its output is kept."""
    with Client(namespace=namespace, context=context, kubeconfig=kubeconfig) as client:
        job = client.get(name)
        if not yes and not job.is_finished:
            typer.confirm(f"{job.namespace}/{name} is {job.phase or 'new'}; delete it?", abort=True)
        client.delete(name)
        print(f"{name} deleted")
