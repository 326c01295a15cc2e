"""Operator process that runs the real controller, informers and work queue on a simulated connection."""

import asyncio
from collections.abc import Callable, Coroutine
from datetime import datetime, timedelta
from typing import Any

from finetune_api.v1alpha1.status import Progress
from finetune_operator import names
from finetune_operator.controller.controller import Controller
from finetune_operator.controller.job_cache import get_job_key
from finetune_operator.controller.progress_poller import POLL_INTERVAL_SECONDS
from finetune_operator.controller.reconcile import PassDependencies
from finetune_operator.kube.api_client import ApiError
from finetune_operator.kube.cluster import KubernetesCluster, collection_path
from finetune_operator.metrics import Metrics
from finetune_operator.settings import Settings
from testing.simulator.world.apiserver import RawBody
from testing.simulator.world.network import OperatorConnection

WORKERS = 2
RESYNC_SECONDS = 300.0
METRICS = Metrics()  # shared, because one registry per process is slow and its values are not read


class SimulatedOperator:
    """An operator started as in finetune_operator.manager.manager, but without kopf and leader election."""

    def __init__(
        self,
        connection: OperatorConnection,
        settings: Settings,
        now: Callable[[], datetime],
        read_progress: Callable[[str], Progress | None],
    ) -> None:
        self.connection = connection
        self.clock_offset = timedelta()
        self._read_progress = read_progress
        self.is_running = True
        run = PassDependencies(KubernetesCluster(connection), settings, lambda: now() + self.clock_offset)
        self.controller = Controller(connection, run, METRICS, namespaces=(None,))
        self._tasks = [self._spawn(self._start())]

    def crash(self) -> None:
        """Stop the process immediately, even in the middle of an operation."""
        self.is_running = False
        for task in self._tasks:
            task.cancel()

    async def _start(self) -> None:
        for informer in self.controller.informers:
            self._tasks.append(self._spawn(informer.run()))
        for informer in self.controller.informers:
            await informer.synced.wait()
        await self._list_jobs()
        self._tasks.append(self._spawn(self._watch_jobs()))
        self._tasks.append(self._spawn(self._resync()))
        self._tasks.append(self._spawn(self._poll_progress()))
        self.controller.start_leading(lambda: self.is_running)
        self._tasks.extend(self._spawn(self.controller.run_worker()) for _ in range(WORKERS))

    async def _watch_jobs(self) -> None:
        """List and watch jobs, and relist after an error, as kopf does; deletions during the gap are missed."""
        path = collection_path(names.FINETUNEJOB_KIND, None)
        while True:
            try:
                version = ""
                async for page in self.connection.list_pages(path):
                    version = page["metadata"]["resourceVersion"]
                    for body in page["items"]:
                        self._dispatch_event("ADDED", body)
                async for event in self.connection.watch(path, selector="", version=version):
                    self._dispatch_event(event["type"], event["object"])
            except ApiError:
                await asyncio.sleep(1.0)

    async def _poll_progress(self) -> None:
        """Poll the progress, as the progress poller does, and keep it in memory."""
        while True:
            await asyncio.sleep(POLL_INTERVAL_SECONDS)
            for key in self.controller.jobs:
                if not self.connection.is_partitioned and (progress := self._read_progress(key.uid)):
                    self.controller.progress_poller._store_progress(key, progress)

    def _dispatch_event(self, event_type: str, body: RawBody) -> None:
        if event_type == "DELETED":
            self.controller.on_job_deleted(get_job_key(body))
        else:
            self.controller.on_job_event(body)

    async def _list_jobs(self) -> None:
        while True:
            try:
                await self.controller.resync_jobs()
                return
            except ApiError:
                await asyncio.sleep(1.0)

    async def _resync(self) -> None:
        while True:
            await asyncio.sleep(RESYNC_SECONDS)
            await self._list_jobs()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(coroutine)
