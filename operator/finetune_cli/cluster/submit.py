"""Command `finetune submit`, which creates a job in the cluster and can follow it to its end."""

from datetime import UTC, datetime
from typing import Annotated

import typer

from finetune_cli.cluster.follow import follow_job
from finetune_cli.cluster.options import ContextOption, KubeconfigOption
from finetune_cli.job_file import FileArgument, JobFile, NamespaceOption, read_job_file
from finetune_client.client import Client
from finetune_client.errors import JobFailed
from finetune_operator.plan.run_plan import describe_batch


def submit(
    file: FileArgument,
    namespace: NamespaceOption = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print events and progress until the job ends.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Validate the job by the API server, without creating it.")
    ] = False,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
) -> None:
    """Create a job in the cluster.

    The file is validated first. An unfinished job with the same name is changed, as far as the API allows it.
    Exit code 0: created, and with --follow complete; 1: the job has failed; 2: the file is not valid; 3: the API
    server rejects the job.
    """
    job_file = read_job_file(file, namespace=namespace)
    with Client(namespace=job_file.explicit_namespace, context=context, kubeconfig=kubeconfig) as client:
        name = job_file.job.metadata.name
        submitted_at = datetime.now(UTC)
        existing = client.find(name)
        job = client.submit(job_file.body, dry_run=dry_run)
        print(f"{job.namespace}/{name} {_describe_change(existing is None, dry_run=dry_run)}: {summarise(job_file)}")
        if dry_run or not follow:
            return
        ended = follow_job(client, name, since=submitted_at if existing is None else None)
    if ended.failure is not None:
        raise JobFailed(f"{name} has failed; finetune why {name} explains it")


def summarise(job_file: JobFile) -> str:
    """Return the number of processes and the effective batch in one line."""
    spec = job_file.job.spec
    ranks = f"{spec.num_nodes} x {spec.ranks_per_node} processes"
    return ranks if spec.command is not None else f"{ranks}, effective batch {describe_batch(spec)}"


def _describe_change(is_new: bool, *, dry_run: bool) -> str:
    change = "created" if is_new else "configured"
    return f"would be {change}" if dry_run else change
