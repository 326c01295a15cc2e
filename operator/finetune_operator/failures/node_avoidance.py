"""Kubernetes nodes that an attempt keeps away from, and the failures for which it does."""

from collections import Counter
from datetime import datetime, timedelta
from typing import Any

from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import AttemptRecord

KEPT_ATTEMPTS = 20
_REMEMBERED = timedelta(hours=24)
_STRIKES = 2
BROKEN = frozenset({Reason.GPU_HARDWARE, Reason.GPU_UNAVAILABLE, Reason.DRIVER_MISMATCH})  # for which once is enough
SUSPICIOUS = frozenset(
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


def nodes_to_avoid(attempts: tuple[AttemptRecord, ...], now: datetime) -> tuple[str, ...]:
    """Those with broken hardware, and those that failed the job twice within a day in a way that a machine may."""
    strikes: Counter[str] = Counter()
    for record in attempts:
        strikes[record.k8s_node] += _strikes(record, now)
    return tuple(sorted(node for node, count in strikes.items() if count >= _STRIKES))


def remember(attempts: tuple[AttemptRecord, ...], now: datetime) -> tuple[AttemptRecord, ...]:
    """The last 20, but rather those for which a Kubernetes node is avoided: it would be forgiven with them."""
    if len(attempts) <= KEPT_ATTEMPTS:
        return attempts
    avoided = nodes_to_avoid(attempts, now)
    older = enumerate(attempts[:-2])  # the newest two say how it goes on
    spare = (number for number, record in older if not _strikes(record, now) or record.k8s_node not in avoided)
    least = next(spare, 0)
    return (*attempts[:least], *attempts[least + 1 :])


def _strikes(record: AttemptRecord, now: datetime) -> int:
    """What an attempt holds against the machine of the node that ended it."""
    if not record.k8s_node or record.end_time is None or record.end_time < now - _REMEMBERED:
        return 0
    return _STRIKES if record.reason in BROKEN else int(record.reason in SUSPICIOUS)


def keep_away(affinity: dict[str, Any] | None, nodes: tuple[str, ...]) -> dict[str, Any] | None:
    """A pod's affinity, with these nodes excluded; what it asks for besides still holds.

    Terms are alternatives, so that every one of them must exclude the nodes; a field takes one name at a time.
    """
    if not nodes:
        return affinity
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    given = dict(affinity or {})
    node_affinity = dict(given.get("nodeAffinity") or {})
    required = dict(node_affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {})
    terms = required.get("nodeSelectorTerms") or [{}]
    required["nodeSelectorTerms"] = [{**term, "matchFields": [*term.get("matchFields", ()), *fields]} for term in terms]
    node_affinity["requiredDuringSchedulingIgnoredDuringExecution"] = required
    return {**given, "nodeAffinity": node_affinity}
