"""Runs the manager of the operator in virtual time, with a fake of everything around it, so that all its loops work."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from finetune_operator import names
from finetune_operator.controller import controller as controller_module
from finetune_operator.controller.child_cache import JobKey
from finetune_operator.controller.controller import Controller
from finetune_operator.controller.progress_poller import PollTarget
from finetune_operator.controller.reconcile import PassDependencies, PassResult
from finetune_operator.kube.api_client import ApiError
from finetune_operator.kube.api_paths import collection_path
from finetune_operator.kube.cluster import ClusterError
from finetune_operator.kube.missing_rights import MissingRights
from finetune_operator.manager import health
from finetune_operator.manager import manager as manager_module
from finetune_operator.manager.manager import Connections, Manager, OperatorOptions
from finetune_operator.metrics import Metrics
from finetune_operator.notifications import notifier
from finetune_operator.notifications.sink import SendResult, SinkConfig
from testing.builders.jobs import SETTINGS, RawBody
from testing.fakes.http_api import describe_refusal
from testing.fakes.recording_cluster import RecordingCluster

JOBS, DELETED_JOBS = ("a", "b", "conflicting", "broken"), ("c", "d")
METRICS = Metrics()  # shared, because a registry is slow


class ManagerWorld:
    """API server, pods and sink of the manager; `steps` has the time of the last of each step that its loops take."""

    def __init__(self, failures: Iterable[str]) -> None:
        self.steps: dict[str, float] = {}
        self.missing_rights = MissingRights()
        path = collection_path("PersistentVolumeClaim", "c")
        self.missing_rights.record(
            "GET", path, status=403, message=f"c {describe_refusal('get persistentvolumeclaims')}"
        )
        self.failures = ["no CRD", "no jobs", "held lease", *failures]  # each happens once

    def record(self, step: str) -> None:
        self.steps[step] = asyncio.get_running_loop().time()

    def measure_lag(self, _seconds: float) -> None:
        self.record("measure lag")
        if self._fails("unexpected lag"):
            raise KeyError("lag")

    async def call(self, _method: str, _path: str) -> RawBody:
        return {"resources": [] if self._fails("no CRD") else [{"name": names.FINETUNEJOB[2]}]}

    async def call_once(self, method: str, _path: str, *, body: RawBody | None = None) -> RawBody:
        self.record(f"lease {method}")
        if method == "GET" and not self._fails("held lease"):
            raise ApiError("not found", status=404)
        held = {"spec": {"holderIdentity": "other", "leaseDurationSeconds": 1}}
        return {**(body or held), "metadata": {"resourceVersion": str(asyncio.get_running_loop().time())}}

    async def list_pages(self, path: str, **_: object) -> AsyncIterator[RawBody]:
        kind = path.rpartition("/")[2]
        if kind == "finetunejobs" and self._fails("no jobs"):
            raise ApiError("unavailable", status=503)
        items: dict[str, list[RawBody]] = {
            "finetunejobs": [{"metadata": _build_metadata(name)} for name in JOBS],
            "pods": [_build_pod(job, finalizers=[names.KUEUE_FINALIZER], deletionTimestamp="") for job in DELETED_JOBS],
        }
        yield {"metadata": {"resourceVersion": "1"}, "kind": "List", "apiVersion": "v1", "items": items.get(kind, [])}
        self.record(f"list {kind}")

    async def watch(self, path: str, **_: object) -> AsyncIterator[RawBody]:
        if self._fails("unexpected event"):
            raise KeyError("object")
        for version in range(2, 6):
            await asyncio.sleep(2)
            yield {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(version)}}}
            self.record(f"watch {path}")

    @asynccontextmanager
    async def get(self, url: str, **_: object) -> AsyncIterator[Any]:
        async def readexactly(_size: int) -> bytes:
            self.record(f"poll {url}")
            return b"{}"

        yield SimpleNamespace(status=200, content=SimpleNamespace(readexactly=readexactly))

    async def send(self, event_id: str, _body: bytes) -> tuple[SendResult, str]:
        self.record(f"send {event_id}")
        return SendResult.DELIVERED, ""

    async def __aenter__(self) -> "ManagerWorld":
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stay open."""

    def _fails(self, failure: str) -> bool:
        if is_due := failure in self.failures:
            self.failures.remove(failure)
        return is_due


class FakeManager(Manager):
    """Manager without kopf and gauges, whose passes are fakes and send an event."""

    def __init__(self, world: ManagerWorld) -> None:
        self._world = world
        client: Any = world
        credentials: Any = SimpleNamespace(namespace="system", server="")
        options = OperatorOptions(SETTINGS, workers=2, sink=SinkConfig(None))
        super().__init__(options, Connections(credentials, METRICS, client, client))
        controller = self._controller
        for part in (controller.net, controller.orphan_sweeper, self._notifier and self._notifier._net):
            part._clock = time.monotonic  # type: ignore[union-attr]
        controller.children.prune = lambda: world.record("prune")  # type: ignore[method-assign]
        targets = [PollTarget(JobKey(name, f"{name}-uid"), 0, name) for name in JOBS[:2]]
        controller.progress_poller._find_targets = lambda: targets  # type: ignore[method-assign]

    def _build_controller(self) -> Controller:
        cluster = RecordingCluster(unlisted_pods={f"{job}-0-0": _build_pod(job) for job in DELETED_JOBS})
        cluster._record = lambda line: self._world.record(line)  # type: ignore[method-assign]
        dependencies = PassDependencies(cluster, SETTINGS, self._clock.now)
        return Controller(self._connections.client, dependencies, METRICS, namespaces=(None,))

    async def reconcile(self, _: object, job: RawBody, *_state: object, problem: str = "") -> PassResult:
        """Run a pass, or a degraded one of a job with a problem."""
        name, key = job["metadata"]["name"], (job["metadata"]["namespace"], job["metadata"]["uid"])
        self._world.record(f"{'degraded ' if problem else ''}pass {name}")
        if name == "conflicting":
            raise ClusterError("conflict")
        if name == "broken" and not problem:
            raise KeyError("metadata")
        assert self._notifier is not None
        self._notifier._events.setdefault(key, deque()).append(notifier.QueuedEvent(name, b"", self._clock.now()))
        self._notifier._queued[key[0]] += 1
        self._notifier._queue.add(key)
        return PassResult(job, requeue_after=timedelta(seconds=5))

    async def state_missing_rights(self, _: object, job: RawBody, _rights: object) -> PassResult:
        """Change nothing."""
        self._world.record(f"state missing rights of {job['metadata']['name']}")
        return PassResult(job)

    async def _start_kopf(self, stop_event: asyncio.Event) -> None:
        """Watch nothing."""

    def _register_gauges(self) -> None:
        """Register nothing, because all managers share the metrics."""


async def run_manager(
    patch: pytest.MonkeyPatch, *, seconds: float, failures: Iterable[str] = ()
) -> tuple[ManagerWorld, bool]:
    """Run the manager for some virtual time; return its world, and whether it still runs."""
    world = ManagerWorld(failures)
    patch.setattr(time, "monotonic", asyncio.get_running_loop().time)
    manager = FakeManager(world)
    patch.setattr(controller_module, "reconcile", manager.reconcile)
    patch.setattr(controller_module, "reconcile_degraded", manager.reconcile)
    patch.setattr(controller_module, "state_missing_rights", manager.state_missing_rights)
    patch.setattr(controller_module, "read_job", lambda _, job: asyncio.sleep(0, job))
    patch.setattr(notifier, "HttpSink", lambda *_, **__: world)
    patch.setattr(aiohttp, "ClientSession", lambda **_: world)
    patch.setattr(manager_module, "RESYNC_INTERVAL_SECONDS", 20.0)
    patch.setattr(manager_module, "exit_immediately", lambda: None)
    patch.setattr(health, "LAG_INTERVAL_SECONDS", 5.0)
    patch.setattr(METRICS, "loop_lag", SimpleNamespace(set=world.measure_lag))
    task = asyncio.create_task(manager.run(asyncio.Event()))
    await asyncio.wait((task,), timeout=seconds)
    is_running = not task.done()
    task.cancel()
    await asyncio.wait((task,))
    return world, is_running


def _build_metadata(name: str, **fields: Any) -> RawBody:
    return {"name": name, "namespace": name[0], "uid": f"{name}-uid", "resourceVersion": "1", **fields}


def _build_pod(job: str, **fields: Any) -> RawBody:
    owner = {"apiVersion": names.API_VERSION, "kind": names.FINETUNEJOB_KIND, "name": job, "uid": f"{job}-uid"}
    labels, owners = {names.JOB_UID: f"{job}-uid"}, [{**owner, "controller": True}]
    return {"metadata": _build_metadata(f"{job}-0-0", labels=labels, ownerReferences=owners, **fields), "status": {}}
