"""Records when the pods of each attempt are created, run and are deleted."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.kubeflow.objects import JOBSET_NAME_LABEL, NODE_INDEX_LABEL, RESTART_ATTEMPT_LABEL
from benchmarks.load.job_bodies import RawBody
from finetune_operator import names

_OPERATOR_LABELS = (names.JOB_NAME, names.ATTEMPT, names.NODE_RANK)
_KUBEFLOW_LABELS = (JOBSET_NAME_LABEL, RESTART_ATTEMPT_LABEL, NODE_INDEX_LABEL)


class AttemptKey(NamedTuple):
    """Identity of one attempt of a FineTuneJob or TrainJob."""

    job: str
    attempt: int


class ObservedAttempt:
    """Existing pods of one attempt by node, and when each node's pod was first observed at all and running.

    The times are those of `time.monotonic()`.
    """

    def __init__(self) -> None:
        self.existing: dict[int, RawBody] = {}
        self.created_at: dict[int, float] = {}
        self.running_at: dict[int, float] = {}
        self.changed = asyncio.Event()


class PodTimes:
    """Pods of all attempts, updated by an informer."""

    def __init__(self) -> None:
        self.attempts: defaultdict[AttemptKey, ObservedAttempt] = defaultdict(ObservedAttempt)

    def on_pod_event(self, old_pod: RawBody | None, new_pod: RawBody | None) -> None:
        """Record a pod event of an informer."""
        key, node = identify_pod(new_pod or old_pod or {})
        pods = self.attempts[key]
        if new_pod is None:
            pods.existing.pop(node, None)
        else:
            pods.existing[node] = new_pod
            pods.created_at.setdefault(node, time.monotonic())
            if new_pod.get("status", {}).get("phase") == "Running":
                pods.running_at.setdefault(node, time.monotonic())
        pods.changed.set()

    async def wait_until_created(self, key: AttemptKey, *, nodes: int) -> float:
        """Wait until the pods of all nodes exist; return when the last one was observed."""
        pods = await self._wait_until(key, lambda pods: len(pods.created_at) >= nodes)
        return max(pods.created_at.values())

    async def wait_until_running(self, key: AttemptKey, *, nodes: int) -> float:
        """Wait until the pods of all nodes run; return when the last one was observed running."""
        pods = await self._wait_until(key, lambda pods: len(pods.running_at) >= nodes)
        return max(pods.running_at.values())

    async def wait_until_deleted(self, key: AttemptKey) -> None:
        """Wait until no pod of the attempt exists."""
        await self._wait_until(key, lambda pods: not pods.existing)

    async def _wait_until(self, key: AttemptKey, predicate: Callable[[ObservedAttempt], bool]) -> ObservedAttempt:
        pods = self.attempts[key]
        while not predicate(pods):
            pods.changed.clear()
            await pods.changed.wait()
        return pods


def identify_pod(pod: RawBody) -> tuple[AttemptKey, int]:
    """Return the attempt and the node of a pod, by the labels of the operator or of JobSet."""
    labels = pod["metadata"]["labels"]
    job, attempt, node = _OPERATOR_LABELS if names.JOB_NAME in labels else _KUBEFLOW_LABELS
    return AttemptKey(labels[job], int(labels[attempt])), int(labels[node])
