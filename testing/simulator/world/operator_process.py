"""One operator process: the real controller, informers, queue and client on a simulated connection."""

import asyncio
from collections.abc import Callable, Coroutine
from datetime import datetime, timedelta
from typing import Any

from finetune_api.v1alpha1.status import Progress
from finetune_operator import names
from finetune_operator.controller.controller import Controller
from finetune_operator.controller.job_cache import job_key
from finetune_operator.controller.progress_poller import INTERVAL
from finetune_operator.controller.reconcile import Pass
from finetune_operator.kube.api_client import ApiError
from finetune_operator.kube.cluster import KubernetesCluster, collection_path
from finetune_operator.metrics import Metrics
from finetune_operator.plan.run_plan import Settings
from testing.simulator.world.apiserver import Raw
from testing.simulator.world.network import Link

WORKERS = 2
RESYNC_SECONDS = 300.0
METRICS = Metrics()  # shared, because nobody reads it and each has a registry to fill


class OperatorProcess:
    """Starts as finetune_operator.manager.manager does, without kopf and the Lease, and dies when told."""

    def __init__(
        self,
        link: Link,
        settings: Settings,
        now: Callable[[], datetime],
        ask_for_progress: Callable[[str], Progress | None],
    ) -> None:
        self.link = link
        self.clock_error = timedelta()
        self._ask_for_progress = ask_for_progress
        self.alive = True
        run = Pass(KubernetesCluster(link), settings, lambda: now() + self.clock_error)
        self.controller = Controller(link, run, METRICS, namespaces=(None,))
        self._tasks = [self._spawn(self._start())]

    def crash(self) -> None:
        """The process is gone, in the middle of whatever it did."""
        self.alive = False
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
        self._tasks.append(self._spawn(self._poll()))
        self.controller.lead(lambda: self.alive)
        self._tasks.extend(self._spawn(self.controller.work()) for _ in range(WORKERS))

    async def _watch_jobs(self) -> None:
        """As kopf does: list, follow, and list again after any trouble; what was deleted meanwhile is not told."""
        path = collection_path(names.FINETUNEJOB_KIND, None)
        while True:
            try:
                version = ""
                async for page in self.link.pages(path):
                    version = page["metadata"]["resourceVersion"]
                    for body in page["items"]:
                        self._tell("ADDED", body)
                async for event in self.link.watch(path, selector="", version=version):
                    self._tell(event["type"], event["object"])
            except ApiError:
                await asyncio.sleep(1.0)

    async def _poll(self) -> None:
        """As the poller of progress does; what it is told lives in the operator's memory only."""
        while True:
            await asyncio.sleep(INTERVAL)
            for key in self.controller.jobs:
                if not self.link.cut and (progress := self._ask_for_progress(key.uid)):
                    self.controller.progress._take(key, progress)

    def _tell(self, kind: str, body: Raw) -> None:
        if kind == "DELETED":
            self.controller.drop(job_key(body))
        else:
            self.controller.take(body)

    async def _list_jobs(self) -> None:
        while True:
            try:
                await self.controller.list_jobs()
                return
            except ApiError:
                await asyncio.sleep(1.0)

    async def _resync(self) -> None:
        while True:
            await asyncio.sleep(RESYNC_SECONDS)
            await self._list_jobs()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work)
