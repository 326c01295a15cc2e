"""From what is heard to what is done: the controller with its queue, against an API server in memory."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import pytest

from finetune_operator.controller.controller import Controller
from finetune_operator.controller.job_cache import job_key
from finetune_operator.controller.reconcile import Pass
from finetune_operator.kube.cluster import KubernetesCluster
from finetune_operator.metrics import Metrics
from testing.builders.jobs import SETTINGS, spec
from testing.fakes.api_client import connected
from testing.fakes.http_api import Fault, HttpApi

Raw = dict[str, Any]


def put_job(api: HttpApi, name: str, **fields: Any) -> Raw:
    metadata = {"name": name, "generation": 1, "creationTimestamp": "2026-01-01T00:00:00Z"}
    return api.put("finetunejobs", {"metadata": metadata, "spec": spec(), **fields})


@asynccontextmanager
async def controlling(
    api: HttpApi, *, now: Callable[[], datetime] = lambda: datetime.now(UTC), lead: bool = True
) -> AsyncIterator[tuple[Controller, Metrics]]:
    for claim in ("models", "datasets"):
        api.put("persistentvolumeclaims", {"metadata": {"name": claim}, "spec": {"accessModes": ["ReadWriteMany"]}})
    metrics = Metrics()
    async with connected(api) as server:
        run = Pass(KubernetesCluster(server), SETTINGS, now)
        controller = Controller(server, run, metrics, namespaces=(None,))
        await controller.list_jobs()
        if lead:
            controller.lead(lambda: True)
        tasks = [asyncio.create_task(informer.run()) for informer in controller.informers]
        tasks += [asyncio.create_task(controller.work()) for _ in range(3)]
        for informer in controller.informers:
            await informer.synced.wait()
        try:
            yield controller, metrics
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def pods(api: HttpApi) -> list[str]:
    return sorted(name for plural, _, name in api.objects if plural == "pods")


async def test_a_job_that_is_heard_of_gets_its_pods() -> None:
    api = HttpApi()
    async with controlling(api) as (controller, _):
        controller.take(put_job(api, "a"))
        await until(lambda: pods(api) == ["a-0-0", "a-0-1"])


async def test_an_echo_of_our_own_write_is_no_reason_for_a_pass() -> None:
    api = HttpApi()
    async with controlling(api) as (controller, metrics):
        controller.take(put_job(api, "a"))
        await until(lambda: len(pods(api)) == 2)
        await asyncio.sleep(0.3)

        def passes() -> float:
            samples = [s for metric in metrics.reconcile.collect() for s in metric.samples]
            return sum(sample.value for sample in samples if sample.name.endswith("_count"))

        before = passes()
        controller.take(api.objects["finetunejobs", "default", "a"])
        await asyncio.sleep(0.2)
        assert passes() == before
        changed = put_job(api, "a", spec=spec(suspend=True))
        controller.take(changed)
        await until(lambda: passes() > before)


async def test_a_write_counts_as_ours_though_the_watch_tells_of_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    api, write = HttpApi(), KubernetesCluster.write_status
    async with controlling(api) as (controller, _):

        async def told_before_it_is_answered(cluster: KubernetesCluster, job: Raw, status: Raw) -> Raw:
            written = await write(cluster, job, status)
            controller.take(written)
            return written

        monkeypatch.setattr(KubernetesCluster, "write_status", told_before_it_is_answered)
        job = put_job(api, "a")
        controller.take(job)
        await until(lambda: len(pods(api)) == 2)

        assert controller._see(job_key(job)).since_write is not None


async def test_a_standby_hears_but_does_nothing_until_it_leads() -> None:
    api = HttpApi()
    put_job(api, "before")
    async with controlling(api, lead=False) as (controller, _):
        controller.take(put_job(api, "later"))
        await asyncio.sleep(0.2)
        assert (len(controller.jobs), pods(api), len(controller.queue)) == (2, [], 0)
        controller.lead(lambda: True)
        await until(lambda: len(pods(api)) == 4)


async def test_a_worker_that_lost_the_lease_begins_no_pass() -> None:
    api = HttpApi()
    async with controlling(api, lead=False) as (controller, _):
        leading = True
        controller.lead(lambda: leading)
        leading = False
        controller.queue.add(job_key(put_job(api, "a")))
        controller.take(put_job(api, "a"))
        await asyncio.sleep(0.2)
    assert pods(api) == []
    assert api.asked("PUT", "finetunejobs") == []


async def test_a_failed_pass_is_repeated_and_told_once_until_one_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    api = HttpApi()
    api.faults += [Fault("PUT", "finetunejobs", 500, times=3), Fault("POST", "pods", 507, times=20)]
    async with controlling(api) as (controller, metrics):
        with caplog.at_level(logging.WARNING):
            controller.take(put_job(api, "a"))
            await until(lambda: len(pods(api)) == 2)
        failed = metrics.registry.get_sample_value("finetune_reconcile_seconds_count", {"result": "ClusterError"})
        assert (failed or 0) > 3
    # one pass succeeded in between: it wrote the status
    assert [vars(record)["job"] for record in caplog.records] == ["default/a"] * 2


async def test_a_write_that_was_done_though_its_answer_was_lost_is_known_without_the_watch() -> None:
    api = HttpApi()
    api.faults.append(Fault("PUT", "finetunejobs", 0, after=True))
    async with controlling(api) as (controller, _):
        controller.take(put_job(api, "a"))
        await until(lambda: len(pods(api)) == 2)


async def test_a_job_made_again_while_a_pass_failed_is_another() -> None:
    api = HttpApi()
    api.faults.append(Fault("PUT", "finetunejobs", 500, times=3))
    async with controlling(api) as (controller, _):
        controller.take(put_job(api, "a"))
        await until(lambda: api.asked("PUT", "finetunejobs") != [])
        api.remove("finetunejobs", "a")
        put_job(api, "a")
        await until(lambda: len(controller.jobs) == 0)
    assert pods(api) == []


async def test_a_bug_in_one_jobs_pass_stops_no_other_job(caplog: pytest.LogCaptureFixture) -> None:
    api, calls = HttpApi(), 0

    def broken_clock() -> datetime:
        nonlocal calls
        calls += 1
        return datetime.now(UTC) if calls > 2 else datetime.fromtimestamp(1 / 0, UTC)

    async with controlling(api, now=broken_clock) as (controller, _):
        controller.take(put_job(api, "a"))
        controller.take(put_job(api, "b"))
        await until(lambda: len(pods(api)) == 4)
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 2
    assert all(error.exc_info for error in errors)


async def test_a_job_that_answers_not_found_is_dropped() -> None:
    api = HttpApi()
    async with controlling(api) as (controller, _):
        gone = put_job(api, "a")
        api.remove("finetunejobs", "a")
        controller.take(gone)
        await until(lambda: len(controller.jobs) == 0)
    assert pods(api) == []


async def test_a_job_deleted_during_its_pass_stays_deleted() -> None:
    api = HttpApi()
    deleted = asyncio.Event()

    def delete_while_reading_the_clock() -> datetime:
        if not deleted.is_set():
            deleted.set()
            controller.drop(job_key(job))
        return datetime.now(UTC)

    async with controlling(api, now=delete_while_reading_the_clock) as (controller, _):
        job = put_job(api, "a")
        controller.take(job)
        await until(lambda: bool(api.asked("PUT", "finetunejobs")))
        await asyncio.sleep(0.3)
        assert len(controller.jobs) == 0


async def test_listing_finds_what_no_watch_told() -> None:
    api = HttpApi()
    gone = put_job(api, "gone")
    async with controlling(api) as (controller, _):
        api.remove("finetunejobs", "gone", silently=True)
        put_job(api, "new")
        await controller.list_jobs()
        assert job_key(gone) not in controller.jobs
        await until(lambda: "new-0-0" in pods(api))


async def test_pods_of_a_job_not_heard_of_wait_for_it() -> None:
    api = HttpApi()
    async with controlling(api) as (controller, _):
        job = put_job(api, "a")
        labels = {"app.kubernetes.io/managed-by": "finetune-operator", "finetune.dev/job-uid": job["metadata"]["uid"]}
        api.put("pods", {"metadata": {"name": "a-7-0", "labels": labels}})
        await until(lambda: len(controller.children.pods(job_key(job))) == 1)
        assert len(controller.queue) == 0


async def test_restarts_are_counted_by_reason() -> None:
    async with controlling(HttpApi()) as (controller, metrics):
        ended = {"attempt": 0, "reason": "RankKilled", "fault": "infrastructure"}
        after = {"status": {"restarts": 1, "attempts": [ended, {"attempt": 1}]}}
        controller._count_restarts({}, after)
        controller._count_restarts(after, after)
        labels = {"reason": "RankKilled", "fault": "infrastructure"}
        assert metrics.registry.get_sample_value("finetune_job_restarts_total", labels) == 1
