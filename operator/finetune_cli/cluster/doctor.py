"""Command `finetune doctor`, which checks whether a cluster and the user's rights suffice for jobs."""

import sys
from importlib import metadata

from finetune_cli.cluster.options import ContextOption, KubeconfigOption, NamespaceOption
from finetune_cli.errors import EXIT_FAILED
from finetune_cli.table import format_table
from finetune_client.client import Client
from finetune_client.doctor import CheckOutcome
from finetune_operator import names


def doctor(
    namespace: NamespaceOption = None, context: ContextOption = None, kubeconfig: KubeconfigOption = None
) -> None:
    """Check the cluster, the operator, your rights, storage and GPUs. It changes nothing.

    Exit code 1 if a check fails. The outcome is unknown if you may not read what the check needs.
    """
    with Client(namespace=namespace, context=context, kubeconfig=kubeconfig) as client:
        results = client.examine_cluster()
    rows = [("client", CheckOutcome.OK, f"finetune {_get_version()}")]
    rows += [(result.title, result.outcome, result.message) for result in results]
    print(format_table([(title, outcome.value, message) for title, outcome, message in rows]))
    if any(outcome is CheckOutcome.FAILED for _, outcome, _ in rows):
        sys.exit(EXIT_FAILED)


def _get_version() -> str:
    try:
        return metadata.version(names.MANAGER)
    except metadata.PackageNotFoundError:  # running from a source tree, without package metadata
        return "from a source tree"
