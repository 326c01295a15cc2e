"""Reads the positions of Workloads in the LocalQueues of Kueue, from its visibility API."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from finetune_operator.kube.api_client import ApiClient, ApiError
from finetune_operator.kube.api_paths import build_path

API_VERSION = "visibility.kueue.x-k8s.io/v1beta2"
MAX_AGE_SECONDS = 2.0
TIMEOUT_SECONDS = 3.0
EXPECTED_STATUS_CODES = frozenset({403, 404})  # not permitted, or no such queue or API
PAUSE_SECONDS = 30.0  # without requests after one that failed


@dataclass
class _Queue:
    """Positions by Workload, and the time at which they were read; the lock is held during a request."""

    positions: Mapping[str, int] = field(default_factory=dict)
    read_at: float = float("-inf")
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class QueuePositions:
    """Shares the positions of a queue between all passes for MAX_AGE_SECONDS.

    A response contains all pending Workloads of the queue, at most 1,000, so that one request per waiting job would
    make the cost of a queue quadratic (decisions/137). The API is optional, and Kueue serves it, not the API server: if
    it does not respond, positions are unknown for PAUSE_SECONDS, so that it does not delay the passes of all jobs.
    """

    def __init__(self, api: ApiClient) -> None:
        self._api = api
        self._queues: dict[tuple[str, str], _Queue] = {}
        self._paused_until = float("-inf")

    async def list(self, namespace: str, queue_name: str) -> Mapping[str, int]:
        """Return the number of Workloads ahead by the name of the Workload; empty if it is unknown."""
        queue = self._queues.setdefault((namespace, queue_name), _Queue())
        async with queue.lock:
            if self._now() - queue.read_at > MAX_AGE_SECONDS:
                self._forget_old_queues()
                queue.positions = await self._read(namespace, queue_name)
                queue.read_at = self._now()
        return queue.positions

    async def _read(self, namespace: str, queue_name: str) -> Mapping[str, int]:
        if self._now() < self._paused_until:
            return {}
        path = build_path(API_VERSION, "namespaces", namespace, "localqueues", queue_name, "pendingworkloads")
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                return parse_positions(await self._api.call_once("GET", path))
        except (ApiError, TimeoutError, ValueError) as error:
            if not isinstance(error, ApiError) or error.status not in EXPECTED_STATUS_CODES:
                self._paused_until = self._now() + PAUSE_SECONDS
            return {}

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _forget_old_queues(self) -> None:
        oldest = self._now() - MAX_AGE_SECONDS
        self._queues = {
            key: queue for key, queue in self._queues.items() if queue.lock.locked() or queue.read_at > oldest
        }


def parse_positions(pending_workloads: Any) -> dict[str, int]:
    """Return the positions in the response of the visibility API, without entries that have an unknown form."""
    items = pending_workloads.get("items") if isinstance(pending_workloads, dict) else None
    positions: dict[str, int] = {}
    for item in items if isinstance(items, list) else ():
        entry = item if isinstance(item, dict) else {}
        metadata, position = entry.get("metadata"), entry.get("positionInLocalQueue")
        name = metadata.get("name") if isinstance(metadata, dict) else None
        if isinstance(name, str) and isinstance(position, int) and position >= 0:
            positions[name] = position
    return positions
