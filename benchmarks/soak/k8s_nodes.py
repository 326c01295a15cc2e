"""Removal of Kubernetes nodes during a soak test."""

from __future__ import annotations

import asyncio
import random

from benchmarks.load.job_bodies import RawBody
from benchmarks.soak.requests import create, delete
from benchmarks.soak.state import NODE_LOSS, SoakState, get_attempt, get_job_uid
from finetune_operator.kube.api_client import ApiClient
from finetune_operator.kube.api_paths import collection_path, object_path
from testing.cluster.kwok import render_fake_node

NODE_ABSENCE_SECONDS = 90.0  # longer than the period of pod garbage collection


class NodeRemover:
    """Deletes Kubernetes nodes and recreates them after a delay."""

    def __init__(self, api: ApiClient, state: SoakState, random_source: random.Random) -> None:
        self._api = api
        self.removed_count = 0
        self._state = state
        self._random_source = random_source
        self._recreate_tasks: set[asyncio.Task[None]] = set()

    async def run(self, *, node_count: int, interval_seconds: float) -> None:
        """Delete one of `node_count` nodes per interval until cancelled."""
        while True:
            await asyncio.sleep(interval_seconds)
            node = dict(render_fake_node(self._random_source.randrange(1, node_count + 1)))
            name = node["metadata"]["name"]
            if name in self._state.missing_nodes:
                continue
            self._state.missing_nodes.add(name)
            for pod in self._state.list_pods_of_node(name):
                if uid := get_job_uid(pod):
                    self._state.add_cause((uid, get_attempt(pod)), NODE_LOSS)
            self.removed_count += await delete(self._api, object_path("Node", None, name))
            self._recreate_tasks.add(asyncio.create_task(self._recreate(node)))

    async def _recreate(self, node: RawBody) -> None:
        await asyncio.sleep(NODE_ABSENCE_SECONDS)
        await create(self._api, collection_path("Node", None), node)
        self._state.missing_nodes.discard(node["metadata"]["name"])
