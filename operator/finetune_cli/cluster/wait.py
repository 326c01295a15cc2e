"""Command `finetune wait`, which waits until a job reaches a state or ends."""

from typing import Annotated

import typer

from finetune_cli.cluster.options import ContextOption, JobArgument, KubeconfigOption, NamespaceOption
from finetune_client.async_client import WaitTarget
from finetune_client.client import Client
from finetune_client.errors import JobFailed
from finetune_client.job import Job


def wait(
    name: JobArgument,
    target: Annotated[
        WaitTarget, typer.Option("--for", help="State to wait for; the end of the job also ends the wait.")
    ] = WaitTarget.FINISHED,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds (default: no limit).", metavar="SECONDS", show_default=False)
    ] = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
) -> None:
    """Wait until a job reaches a state or ends.

    Exit code 0: the state is reached; 1: the job has ended without it, or failed; 4: the time is over.
    """
    with Client(namespace=namespace, context=context, kubeconfig=kubeconfig) as client:
        job = wait_for(client, name, target, timeout)
    print(f"{name} is {job.phase}")


def wait_for(client: Client, name: str, target: WaitTarget, timeout: float | None) -> Job:
    """Return the job once it has reached the target.

    Raises:
        JobFailed: The job has failed, or has ended without reaching the target.
        WaitTimeout: The timeout in seconds is over.
    """
    job = client.wait(name, target, timeout_seconds=timeout)
    if job.failure is not None:
        raise JobFailed(f"{name} has failed: {job.failure.reason}: {job.failure.message}")
    if not target.is_reached(job) and target is not WaitTarget.TRAINING:
        raise JobFailed(f"{name} has ended ({job.phase}) and was not {target}")
    return job
