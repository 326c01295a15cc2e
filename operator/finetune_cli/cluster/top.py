"""Command `finetune top`, which shows memory and step time of each rank of a running job."""

import sys
from collections.abc import Iterable, Iterator

from finetune_api.v1alpha1.status import Progress
from finetune_cli.cluster.options import ContextOption, JobArgument, KubeconfigOption, NamespaceOption
from finetune_cli.errors import EXIT_CLUSTER
from finetune_cli.table import format_table
from finetune_client.client import Client
from finetune_client.rank_status import NodeRanks, RankStatus

COLUMNS = ("RANK", "NODE", "PHASE", "STEP", "MEMORY", "OWN STEP", "HEARTBEAT")
GIB = 2**30


def top(
    name: JobArgument,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
) -> None:
    """Show memory and step time of each rank of a running job.

    MEMORY is the highest memory so far; OWN STEP is the time of a step in which the rank does not wait for others. The
    command reads the status port of the pods by the API server, and needs the right to get pods/proxy.
    """
    with Client(namespace=namespace, context=context, kubeconfig=kubeconfig) as client:
        job, nodes = client.get(name), client.list_ranks(name)
    if job.status.progress is not None:
        print(" ".join(format_summary(job.status.progress)), end="\n\n")
    if any(node.ranks for node in nodes):
        print(format_rank_table(nodes))
    for node in nodes:
        if node.problem:
            print(node.problem, file=sys.stderr)
    if not any(node.ranks for node in nodes):
        sys.exit(EXIT_CLUSTER)


def format_summary(progress: Progress) -> Iterator[str]:
    """Yield the values of the whole job that are known."""
    yield f"step {progress.step}/{progress.total_steps or '?'}"
    values = (
        ("{:.2f} s/step", progress.step_seconds),
        ("{:.0f} tokens/s", progress.tokens_per_second),
        ("gpu {:.0%}", progress.gpu_utilization),
        ("mfu {:.1%}", progress.mfu),
        ("efficiency {:.0%}", progress.scaling_efficiency),
        ("data {:.0%}", progress.data_wait_share),
    )
    yield from (f" {text.format(value)}" for text, value in values if value is not None)
    if progress.memory is not None and progress.memory.forecast is not None:
        yield f" memory forecast {progress.memory.forecast / GIB:.2f} GiB"


def format_rank_table(nodes: Iterable[NodeRanks]) -> str:
    """Return a table of all ranks, ordered by rank."""
    rows = sorted((rank.rank, _build_row(node.node_rank, rank)) for node in nodes for rank in node.ranks)
    return format_table([COLUMNS, *(row for _, row in rows)])


def _build_row(node_rank: int, rank: RankStatus) -> tuple[str, ...]:
    memory, own_step = rank.peak_memory_bytes, rank.own_step_seconds
    return (
        str(rank.rank),
        str(node_rank),
        rank.phase,
        str(rank.step),
        f"{memory / GIB:.2f} GiB" if memory is not None else "",
        f"{own_step:.2f} s" if own_step is not None else "",
        f"{rank.heartbeat_age_seconds:.0f} s ago",
    )
