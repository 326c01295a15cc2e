"""Records the nodes that succeeded while others kept running, because their pods may be removed.

A clean-up job or the garbage collector can remove them, and a restart of the operator loses its tombstones.
"""

from datetime import datetime, timedelta

from finetune_api.termination import Outcome
from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.status import AttemptRecord, Evidence
from finetune_operator import names
from finetune_operator.failures.summarise_evidence import format_ranks
from finetune_operator.observation.pods import NodeObservation, PodPhase

RECORD_DELAY = timedelta(seconds=10)  # nodes usually end together, and then no record is needed


def add_succeeded_nodes(
    record: AttemptRecord, nodes: tuple[NodeObservation, ...], job: FineTuneJob
) -> tuple[NodeObservation, ...]:
    """Return the observed nodes and, for each recorded success whose pod is not observed, a node that succeeded."""
    observed_ranks = {node.node_rank for node in nodes}
    succeeded_ranks = parse_succeeded(record.succeeded, num_nodes=job.num_attempt_nodes)
    removed_ranks = sorted(succeeded_ranks - observed_ranks)
    removed_nodes = (_build_succeeded_node(record, rank, job) for rank in removed_ranks)
    return tuple(sorted((*nodes, *removed_nodes), key=lambda node: node.node_rank)) if removed_ranks else nodes


def record_successes(record: AttemptRecord, nodes: tuple[NodeObservation, ...], now: datetime) -> AttemptRecord:
    """Return the record with the nodes that succeeded at least RECORD_DELAY ago."""
    ranks = {node.node_rank for node in nodes if node.has_succeeded and _get_remaining_delay(node, now) <= timedelta()}
    succeeded = format_ranks(sorted(ranks))  # nodes contain the recorded successes
    return record if succeeded == record.succeeded else record.model_copy(update={"succeeded": succeeded})


def compute_record_delay(nodes: tuple[NodeObservation, ...], now: datetime) -> timedelta | None:
    """Return the time until the next success is recorded; None without one."""
    delays = (_get_remaining_delay(node, now) for node in nodes if node.has_succeeded)
    return min((delay for delay in delays if delay > timedelta()), default=None)


def _get_remaining_delay(node: NodeObservation, now: datetime) -> timedelta:
    finished_at = node.evidence.finished_at
    return min(RECORD_DELAY, finished_at + RECORD_DELAY - now) if finished_at else timedelta()


def parse_succeeded(text: str, *, num_nodes: int) -> set[int]:
    """Return the ranks below num_nodes in a text such as `0-3,7`; an empty set for any other text."""
    ranks: set[int] = set()
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        try:
            ranks.update(range(max(int(first), 0), min(int(last or first) + 1, num_nodes)))
        except ValueError:
            return set()
    return ranks


def _build_succeeded_node(record: AttemptRecord, rank: int, job: FineTuneJob) -> NodeObservation:
    pod_name = names.pod_name(job.metadata.name, record.attempt, rank)
    evidence = Evidence(node_rank=rank, pod_name=pod_name, ended=True, outcome=Outcome.SUCCEEDED.value, exit_code=0)
    return NodeObservation(
        attempt=record.attempt,
        node_rank=rank,
        pod_name=pod_name,
        uid="",
        phase=PodPhase.GONE,
        is_terminating=False,
        deletion_deadline=None,
        is_scheduled=True,
        waiting=None,
        evidence=evidence,
        termination=None,
    )
