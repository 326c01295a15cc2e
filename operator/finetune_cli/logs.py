"""Command `finetune logs`, which prints the log of one node of the current attempt."""

import sys
from typing import Annotated

import typer

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_cli.cluster_access import ClusterAccess, ContextOption, KubeconfigOption, NamespaceOption
from finetune_cli.errors import BadInput
from finetune_operator import names


def logs(
    name: Annotated[str, typer.Argument(help="Name of the job.")],
    node: Annotated[int, typer.Option(help="Node rank.", min=0)] = 0,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the pod ends.")] = False,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
) -> None:
    """Print the log of one node of a job's current attempt.

    The logs of deleted pods are in the output: <output>/logs/attempt-N/node-R.log.
    """
    access = ClusterAccess(namespace, context=context, kubeconfig=kubeconfig)
    pod = find_pod(FineTuneJob.parse(access.get_job(name)), node)
    try:
        for chunk in access.stream_log(pod, follow=follow):
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def find_pod(job: FineTuneJob, node_rank: int) -> str:
    """Return the pod name of a node in the current attempt. Raises BadInput if there is no such node."""
    if job.status.attempt is None:
        raise BadInput(
            f"{job.metadata.name}: no attempt has started ({job.status.phase or 'not processed by the operator yet'})"
        )
    if node_rank >= job.spec.num_nodes:
        raise BadInput(f"--node {node_rank}: {job.metadata.name} has nodes 0 to {job.spec.num_nodes - 1}")
    return names.pod_name(job.metadata.name, job.status.attempt, node_rank)
