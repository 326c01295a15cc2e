"""Selects the Kubernetes nodes that a job avoids because of earlier failures."""

from collections import Counter
from datetime import datetime, timedelta

from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import AttemptRecord

MAX_KEPT_ATTEMPTS = 20
_STRIKE_LIFETIME = timedelta(hours=24)
_STRIKE_LIMIT = 2
# reasons for avoiding a Kubernetes node after one failure
BROKEN_NODE_REASONS = frozenset({Reason.GPU_HARDWARE, Reason.GPU_UNAVAILABLE, Reason.DRIVER_MISMATCH})
# reasons for avoiding a Kubernetes node after two failures within a day
SUSPICIOUS_REASONS = frozenset(
    {
        Reason.CONTAINER_RUNTIME_ERROR,
        Reason.CUDA_FAULT,
        Reason.HANG,
        Reason.NETWORK_FAULT,
        Reason.NODE_LOST,
        Reason.NODE_REFUSED_POD,
        Reason.RANK_CRASHED,
        Reason.STORAGE_FAULT,
    }
)


def find_nodes_to_avoid(attempts: tuple[AttemptRecord, ...], now: datetime) -> tuple[str, ...]:
    """Return the Kubernetes nodes with broken hardware or two suspicious failures within a day (decisions/207)."""
    strikes: Counter[str] = Counter()
    for record in attempts:
        strikes[record.k8s_node] += _count_strikes(record, now)
    return tuple(sorted(node for node, count in strikes.items() if count >= _STRIKE_LIMIT))


def prune_attempts(attempts: tuple[AttemptRecord, ...], now: datetime) -> tuple[AttemptRecord, ...]:
    """If there are more than 20 records, drop the oldest one that causes no node avoidance."""
    if len(attempts) <= MAX_KEPT_ATTEMPTS:
        return attempts
    avoided_nodes = find_nodes_to_avoid(attempts, now)
    candidates = enumerate(attempts[:-2])  # the status is derived from the newest two records
    droppable_indexes = (
        index for index, record in candidates if not _count_strikes(record, now) or record.k8s_node not in avoided_nodes
    )
    dropped_index = next(droppable_indexes, 0)
    return (*attempts[:dropped_index], *attempts[dropped_index + 1 :])


def _count_strikes(record: AttemptRecord, now: datetime) -> int:
    """Return the number of strikes that a failed attempt adds to the Kubernetes node of its root cause."""
    if not record.k8s_node or record.end_time is None or record.end_time < now - _STRIKE_LIFETIME:
        return 0
    return _STRIKE_LIMIT if record.reason in BROKEN_NODE_REASONS else int(record.reason in SUSPICIOUS_REASONS)
