"""Distinguishes the pods that the operator created from others with their names, labels and owner reference.

Whoever may create pods in a namespace can copy names, labels and owner references. Until the uids of the pods are
recorded, their start key is compared, which is not known before the attempt is recorded (decisions/138).
"""

import hashlib
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import NamedTuple

from finetune_api.v1alpha1.job import FineTuneJob, ObjectMeta
from finetune_operator.observation.ownership import RawBody
from finetune_operator.observation.pods import NodeObservation

UID_CHARACTERS = 8  # 32 random bits of a uid, which the API server chooses


def compute_start_key(job: ObjectMeta, attempt: int, now: datetime) -> str:
    """Return the start key of an attempt that begins now."""
    text = f"{job.uid} {job.resource_version} {attempt} {now.isoformat()}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def join_pod_uids(uids: Mapping[int, str]) -> str:
    """Return the recorded form of the uids by rank, which are those of all ranks."""
    return "".join(_shorten(uids[rank]) for rank in sorted(uids))


def _shorten(uid: str) -> str:
    return uid[:UID_CHARACTERS].ljust(UID_CHARACTERS, "-")


class PodIdentities(NamedTuple):
    """What distinguishes the pods of the newest attempt of a job."""

    attempt: int
    num_nodes: int
    start_key: str  # empty if another release began the attempt
    uids: str  # empty until all pods exist, and if another release created them

    def include(self, node_rank: int, uid: str, start_key: str) -> bool:
        """Return whether the operator created the pod with the name of this node of the attempt."""
        if node_rank >= self.num_nodes:
            return False
        if self.uids:
            return self.uids[node_rank * UID_CHARACTERS :][:UID_CHARACTERS] == _shorten(uid)
        return start_key == self.start_key or not self.start_key


def read_pod_identities(job: RawBody) -> PodIdentities | None:
    """Return what distinguishes the pods of the newest attempt of a raw job; None before the first attempt."""
    status, spec = job.get("status"), job.get("spec")
    attempts = status.get("attempts") if isinstance(status, dict) else None
    record = attempts[-1] if isinstance(attempts, list) and attempts else None
    attempt = record.get("attempt") if isinstance(record, dict) else None
    if not isinstance(record, dict) or not isinstance(attempt, int):
        return None
    num_nodes = record.get("numNodes") or (spec.get("numNodes", 1) if isinstance(spec, dict) else 1)
    is_known = isinstance(num_nodes, int)  # a pass of the job reports a status that cannot be parsed
    keys = str(record.get("startKey", "")), str(record.get("podUids", ""))
    return PodIdentities(attempt, num_nodes if is_known else 0, *keys)


def select_own_nodes(job: FineTuneJob, nodes: Iterable[NodeObservation]) -> tuple[NodeObservation, ...]:
    """Return the nodes without those of the newest attempt whose pod the operator did not create.

    Pods of other attempts are kept: nothing is read from them, but the operator waits until they have ended.
    """
    if not job.status.attempts:
        return tuple(nodes)
    record = job.status.attempts[-1]
    num_nodes = record.num_nodes or job.spec.num_nodes
    pods = PodIdentities(record.attempt, num_nodes, record.start_key, record.pod_uids)
    return tuple(
        node for node in nodes if node.attempt != pods.attempt or pods.include(node.node_rank, node.uid, node.start_key)
    )
