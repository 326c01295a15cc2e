"""Command `finetune doctor`, which checks whether a cluster and the user's rights suffice for jobs."""

import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from finetune_cli.cluster.options import ContextOption, KubeconfigOption, NamespaceOption
from finetune_cli.errors import EXIT_FAILED
from finetune_cli.job_file import read_job_file
from finetune_cli.table import format_table
from finetune_client.client import Client
from finetune_client.doctor import OPERATOR_NAMESPACE, CheckOutcome, ClusterCheck
from finetune_operator import names


def doctor(
    file: Annotated[
        Path | None, typer.Argument(metavar="[JOB.YAML]", help="Job file for the check with pods.", show_default=False)
    ] = None,
    namespace: NamespaceOption = None,
    timeout: Annotated[float, typer.Option(help="Seconds for the pods to start.", min=1)] = 300.0,
    operator_namespace: Annotated[str, typer.Option(help="Namespace of the operator.")] = OPERATOR_NAMESPACE,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
) -> None:
    """Check the cluster, the operator, your rights, storage and GPUs.

    With a job file, it also starts one or two pods with the image and the placement of the job, but without GPUs and
    data, checks image, DNS and network, and deletes them. Without a file, it changes nothing.
    Exit code 1 if a check fails. The outcome is unknown if you may not read what the check needs.
    """
    job_file = read_job_file(file, namespace=namespace) if file else None
    namespace = job_file.explicit_namespace if job_file else namespace
    with Client(namespace=namespace, context=context, kubeconfig=kubeconfig) as client:
        checks = [ClusterCheck("client", CheckOutcome.OK, f"finetune {_get_version()}")]
        checks += client.examine_cluster(operator_namespace=operator_namespace)
        _print_checks(checks)
        if job_file is not None:
            image = job_file.job.spec.image or client.read_default_image(operator_namespace=operator_namespace)
            print(f"\nstarting pods with the image {image} (at most {timeout:g} s) ...", file=sys.stderr, flush=True)
            body = {**job_file.body, "spec": {**job_file.body["spec"], "image": image}}
            pod_checks = client.check_pods(body, timeout_seconds=timeout)
            _print_checks(pod_checks)
            checks += pod_checks
    if any(check.outcome is CheckOutcome.FAILED for check in checks):
        sys.exit(EXIT_FAILED)


def _print_checks(checks: Sequence[ClusterCheck]) -> None:
    print(format_table([(check.title, check.outcome.value, check.message) for check in checks]))


def _get_version() -> str:
    try:
        return metadata.version(names.MANAGER)
    except metadata.PackageNotFoundError:  # running from a source tree, without package metadata
        return "from a source tree"
