"""Tests of the deletion of children that remained after their job was deleted, against an in-memory API server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest

from finetune_operator import names
from finetune_operator.controller.child_cache import ChildCache
from finetune_operator.controller.job_cache import JobCache
from finetune_operator.controller.orphans import MAX_JOBS_PER_ROUND, ORPHAN_GRACE_SECONDS, OrphanSweeper
from finetune_operator.kube.cluster import KubernetesCluster
from finetune_operator.observation.ownership import RawBody
from testing.fakes.api_client import serve_and_connect
from testing.fakes.http_api import HttpApi, ScriptedFault

UID = "0123456789abcdef"


def child(name: str, **owner_fields: Any) -> RawBody:
    owner = {
        "apiVersion": names.API_VERSION,
        "kind": "FineTuneJob",
        "name": "bert",
        "uid": UID,
        "controller": True,
        **owner_fields,
    }
    return {"metadata": {"name": name, "labels": {names.JOB_UID: UID}, "ownerReferences": [owner]}}


class SweeperUnderTest:
    """Sweeper whose clock is set by the test; its caches hold what the test stores in them."""

    def __init__(self, api: HttpApi, cluster: KubernetesCluster) -> None:
        self.api = api
        self.now = 0.0
        self.jobs = JobCache()
        self.children = ChildCache(
            on_change=lambda _key: None,
            current_attempt=self.jobs.current_attempt,
            is_current_pod=self.jobs.is_current_pod,
        )
        self.sweeper = OrphanSweeper(
            cluster, self.jobs, self.children, now=partial(datetime.now, UTC), clock=lambda: self.now
        )

    def put_children(self, **owner_fields: Any) -> None:
        """Create a pod, a Service and a ConfigMap on the server; the caches receive the watched two."""
        self.children.on_pod_event(None, self.api.put("pods", child("bert-3-0", **owner_fields)))
        self.children.on_service_event(None, self.api.put("services", child("bert", **owner_fields)))
        self.api.put("configmaps", child("bert-3-01234567", **owner_fields))

    def list_children(self) -> list[str]:
        return [name for plural, _, name in self.api.objects if plural != "finetunejobs"]

    async def sweep_twice(self) -> None:
        """Sweep now and after the grace period."""
        await self.sweeper.sweep()
        self.now += ORPHAN_GRACE_SECONDS
        await self.sweeper.sweep()


@asynccontextmanager
async def running_sweeper() -> AsyncIterator[SweeperUnderTest]:
    api = HttpApi()
    async with serve_and_connect(api) as client:
        yield SweeperUnderTest(api, KubernetesCluster(client))


@pytest.mark.parametrize("has_successor", [False, True])
async def test_children_of_a_deleted_job_are_deleted_after_the_grace_period(has_successor: bool) -> None:
    async with running_sweeper() as test:
        test.put_children()
        if has_successor:
            test.api.put("finetunejobs", {"metadata": {"name": "bert"}})
        await test.sweeper.sweep()
        test.now += ORPHAN_GRACE_SECONDS / 2
        await test.sweeper.sweep()
        assert len(test.list_children()) == 3
        test.now += ORPHAN_GRACE_SECONDS / 2
        await test.sweeper.sweep()
        assert test.list_children() == []


async def test_children_of_a_job_that_only_the_server_knows_are_kept() -> None:
    async with running_sweeper() as test:
        test.put_children()
        test.api.put("finetunejobs", {"metadata": {"name": "bert", "uid": UID}})
        await test.sweep_twice()
        assert len(test.list_children()) == 3


async def test_children_of_a_cached_job_cause_no_request() -> None:
    async with running_sweeper() as test:
        test.put_children()
        test.jobs.store_if_newer(test.api.put("finetunejobs", {"metadata": {"name": "bert", "uid": UID}}))
        await test.sweep_twice()
        assert test.api.requests == []


@pytest.mark.parametrize(
    "owner_fields",
    [
        {"apiVersion": "example.com/v1"},
        {"kind": "TrainJob"},
        {"uid": "other"},
        {"controller": False},
    ],
)
async def test_objects_that_only_have_the_labels_of_a_deleted_job_are_kept(owner_fields: dict[str, Any]) -> None:
    async with running_sweeper() as test:
        test.put_children(**owner_fields)
        await test.sweep_twice()
        assert len(test.list_children()) == 3


async def test_only_objects_that_are_still_children_are_deleted() -> None:
    """A child may have lost its owner reference by `--cascade=orphan`, or another object may have its name."""
    async with running_sweeper() as test:
        test.put_children()
        test.api.put("services", {"metadata": {"name": "bert"}})
        terminating_pod = child("bert-3-0")
        terminating_pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        test.api.put("pods", terminating_pod)
        await test.sweep_twice()
        assert len(test.list_children()) == 3


async def test_an_error_delays_one_job_only_until_the_next_sweep(caplog: pytest.LogCaptureFixture) -> None:
    async with running_sweeper() as test:
        test.put_children()
        test.api.faults.append(ScriptedFault("DELETE", "services", 403, message="forbidden by a policy"))
        await test.sweep_twice()
        assert test.list_children() == ["bert"]
        assert "forbidden by a policy" in caplog.text
        test.children.on_pod_event(test.api.put("pods", child("bert-3-0")), None)
        test.api.remove("pods", "bert-3-0")
        await test.sweeper.sweep()
        assert test.list_children() == []


async def test_an_unforeseen_error_does_not_end_the_sweeps(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finetune_operator.controller.orphans.SWEEP_INTERVAL_SECONDS", 0.001)
    async with running_sweeper() as test:
        test.put_children()
        await test.sweeper.sweep()
        test.now += ORPHAN_GRACE_SECONDS
        failures = []

        async def get(*arguments: str) -> None:
            failures.append(arguments)
            raise KeyError("metadata")

        monkeypatch.setattr(KubernetesCluster, "get", staticmethod(get))
        run = asyncio.create_task(test.sweeper.run())
        async with asyncio.timeout(10):
            while len(failures) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        run.cancel()
    assert caplog.text.count("KeyError: ") == 1, "the log has one record a minute"


@pytest.mark.parametrize(("age", "is_removed"), [(timedelta(seconds=10), False), (timedelta(minutes=6), True)])
async def test_pod_of_a_lost_kubernetes_node_returns_the_quota_of_its_deleted_job(
    age: timedelta, is_removed: bool
) -> None:
    async with running_sweeper() as test:
        pod = child("bert-0-0")
        deletion_time = (datetime.now(UTC) - age).isoformat()
        pod["metadata"] |= {"finalizers": [names.KUEUE_FINALIZER], "deletionTimestamp": deletion_time}
        pod["metadata"]["labels"][names.KUEUE_MANAGED] = "true"
        body = {**pod, "spec": {"nodeName": "gpu-0"}, "status": {"phase": "Running"}}
        stored = test.api.put("pods", body)
        test.children.on_pod_event(None, stored)
        owner = {"apiVersion": "v1", "kind": "Pod", "name": "bert-0-0", "uid": stored["metadata"]["uid"]}
        test.api.put("workloads", {"metadata": {"name": f"bert-{UID[:8]}", "ownerReferences": [owner]}})

        await test.sweeper.release_quota()

        assert (test.list_children() == []) is is_removed


async def test_forged_children_cost_a_bounded_number_of_requests_and_shadow_no_orphan() -> None:
    async with running_sweeper() as test:
        test.put_children()
        for number in range(500):
            forged = child(f"forged-{number}")
            forged["metadata"]["ownerReferences"][0]["name"] = f"forged-{number}"
            forged["metadata"]["namespace"] = "attacker"
            forged["metadata"] |= {"finalizers": [names.KUEUE_FINALIZER], "deletionTimestamp": "2026-01-01T00:00:00Z"}
            uid = f"{number:016x}"
            forged["metadata"]["labels"][names.JOB_UID] = forged["metadata"]["ownerReferences"][0]["uid"] = uid
            test.children.on_pod_event(None, {**test.api.put("pods", forged), "spec": {}, "status": {}})
        await test.sweeper.sweep()
        test.now += ORPHAN_GRACE_SECONDS
        test.api.requests.clear()
        await test.sweeper.sweep()
        await test.sweeper.release_quota()

        assert len(test.api.requests) < 10 * MAX_JOBS_PER_ROUND
        assert "bert" not in test.list_children()
