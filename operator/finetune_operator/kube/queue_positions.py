"""Reads the positions of Workloads in the LocalQueues of Kueue, from its visibility API."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from finetune_operator.kube.api_client import ApiClient, ApiError
from finetune_operator.observation.ownership import RawBody

MAX_AGE_SECONDS = 2.0


@dataclass
class _Queue:
    """Positions by Workload, and the time at which they were read; the lock is held during a request."""

    positions: Mapping[str, int] = field(default_factory=dict)
    read_at: float = float("-inf")
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class QueuePositions:
    """Shares the positions of a queue between all passes for MAX_AGE_SECONDS.

    A response contains all pending Workloads of the queue, at most 1,000, so that one request per waiting job would
    make the cost of a queue quadratic (decisions/137).
    """

    def __init__(self, api: ApiClient) -> None:
        self._api = api
        self._queues: dict[tuple[str, str], _Queue] = {}

    async def list(self, namespace: str, queue_name: str) -> Mapping[str, int]:
        """Return the number of Workloads ahead by the name of the Workload; empty if Kueue does not serve it."""
        queue = self._queues.setdefault((namespace, queue_name), _Queue())
        async with queue.lock:
            if self._now() - queue.read_at > MAX_AGE_SECONDS:
                self._forget_old_queues()
                queue.positions = await self._read(namespace, queue_name)
                queue.read_at = self._now()
        return queue.positions

    async def _read(self, namespace: str, queue_name: str) -> Mapping[str, int]:
        path = f"/apis/visibility.kueue.x-k8s.io/v1beta2/namespaces/{namespace}/localqueues/{queue_name}"
        try:
            return parse_positions(await self._api.call("GET", f"{path}/pendingworkloads"))
        except ApiError:  # the API is optional, and another program serves it
            return {}

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _forget_old_queues(self) -> None:
        oldest = self._now() - MAX_AGE_SECONDS
        self._queues = {
            key: queue for key, queue in self._queues.items() if queue.lock.locked() or queue.read_at > oldest
        }


def parse_positions(pending_workloads: RawBody) -> dict[str, int]:
    """Return the positions in the response of the visibility API, without entries that have an unknown form."""
    items = pending_workloads.get("items")
    positions: dict[str, int] = {}
    for item in items if isinstance(items, list) else ():
        entry = item if isinstance(item, dict) else {}
        metadata, position = entry.get("metadata"), entry.get("positionInLocalQueue")
        name = metadata.get("name") if isinstance(metadata, dict) else None
        if isinstance(name, str) and isinstance(position, int) and position >= 0:
            positions[name] = position
    return positions
