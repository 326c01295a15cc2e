"""Tests of the controller with its work queue and informers against an in-memory API server."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import pytest

from finetune_operator import names
from finetune_operator.controller.controller import JOB_PAGE_SIZE, Controller, LeaseLost
from finetune_operator.controller.job_cache import get_job_key
from finetune_operator.controller.reconcile import PassDependencies
from finetune_operator.kube.cluster import KubernetesCluster
from finetune_operator.kube.resource_versions import StateRolledBack
from finetune_operator.metrics import Metrics
from finetune_operator.observation.ownership import RawBody
from testing.builders.jobs import SETTINGS, spec
from testing.fakes.api_client import serve_and_connect
from testing.fakes.http_api import HttpApi, ScriptedFault
from testing.processes.waiting import wait_in_event_loop


def put_job(api: HttpApi, name: str, **fields: Any) -> RawBody:
    metadata = {"name": name, "generation": 1, "creationTimestamp": "2026-01-01T00:00:00Z"}
    return api.put("finetunejobs", {"metadata": metadata, "spec": spec(), **fields})


@asynccontextmanager
async def running_controller(
    api: HttpApi, *, now: Callable[[], datetime] = lambda: datetime.now(UTC), is_leader: bool = True
) -> AsyncIterator[tuple[Controller, Metrics]]:
    for claim in ("models", "datasets"):
        api.put("persistentvolumeclaims", {"metadata": {"name": claim}, "spec": {"accessModes": ["ReadWriteMany"]}})
    metrics = Metrics()
    async with serve_and_connect(api) as server:
        dependencies = PassDependencies(KubernetesCluster(server), SETTINGS, now)
        controller = Controller(server, dependencies, metrics, namespaces=(None,))
        await controller.resync_jobs()
        if is_leader:
            controller.start_leading(lambda: True)
        tasks = [asyncio.create_task(informer.run()) for informer in controller.informers]
        tasks += [asyncio.create_task(controller.run_worker()) for _ in range(3)]
        for informer in controller.informers:
            await informer.synced.wait()
        try:
            yield controller, metrics
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


@pytest.fixture
async def controller(api: HttpApi) -> AsyncIterator[Controller]:
    """Return a controller that leads."""
    async with running_controller(api) as (controller, _):
        yield controller


def list_pod_names(api: HttpApi) -> list[str]:
    return sorted(name for plural, _, name in api.objects if plural == "pods")


async def test_watch_event_for_an_own_write_causes_no_pass(api: HttpApi) -> None:
    async with running_controller(api) as (controller, metrics):
        controller.on_job_event(put_job(api, "a"))
        await wait_in_event_loop(lambda: len(list_pod_names(api)) == 2)
        await asyncio.sleep(0.3)

        def count_passes() -> float:
            samples = [s for metric in metrics.reconcile.collect() for s in metric.samples]
            return sum(sample.value for sample in samples if sample.name.endswith("_count"))

        before = count_passes()
        controller.on_job_event(api.objects["finetunejobs", "default", "a"])
        await asyncio.sleep(0.2)
        assert count_passes() == before
        changed = put_job(api, "a", spec=spec(suspend=True))
        controller.on_job_event(changed)
        await wait_in_event_loop(lambda: count_passes() > before)


async def test_own_write_delivered_by_the_watch_before_the_response_is_recognized(
    api: HttpApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = KubernetesCluster.write_status
    async with running_controller(api) as (controller, _):

        async def deliver_before_response(cluster: KubernetesCluster, job: RawBody, status: RawBody) -> RawBody:
            written = await write(cluster, job, status)
            controller.on_job_event(written)
            return written

        monkeypatch.setattr(KubernetesCluster, "write_status", deliver_before_response)
        job = put_job(api, "a")
        controller.on_job_event(job)
        await wait_in_event_loop(lambda: len(list_pod_names(api)) == 2)

        assert controller._cached_state(get_job_key(job)).time_since_status_write is not None


async def test_standby_caches_jobs_but_does_not_reconcile_until_it_leads(api: HttpApi) -> None:
    put_job(api, "before")
    async with running_controller(api, is_leader=False) as (controller, _):
        controller.on_job_event(put_job(api, "later"))
        await asyncio.sleep(0.2)
        assert (len(controller.jobs), list_pod_names(api), len(controller.queue)) == (2, [], 0)
        controller.start_leading(lambda: True)
        await wait_in_event_loop(lambda: len(list_pod_names(api)) == 4)


async def test_workers_raise_instead_of_starting_a_pass_after_losing_the_lease(api: HttpApi) -> None:
    async with running_controller(api, is_leader=False) as (controller, _):
        is_leading = True
        controller.start_leading(lambda: is_leading)
        is_leading = False
        for name in ("a", "b", "c", "d"):  # one job more than the controller has workers
            job = put_job(api, name)
            controller.on_job_event(job)
            controller.queue.add(get_job_key(job))
        await asyncio.sleep(0.2)
        with pytest.raises(LeaseLost):
            await asyncio.wait_for(controller.run_worker(), timeout=20)
    assert list_pod_names(api) == []
    assert api.find_requests("PUT", "finetunejobs") == []


async def test_failed_pass_is_retried_and_logged_once_until_a_pass_succeeds(
    api: HttpApi, caplog: pytest.LogCaptureFixture
) -> None:
    api.faults += [ScriptedFault("PUT", "finetunejobs", 500, times=3), ScriptedFault("POST", "pods", 507, times=20)]
    async with running_controller(api) as (controller, metrics):
        with caplog.at_level(logging.WARNING):
            controller.on_job_event(put_job(api, "a"))
            await wait_in_event_loop(lambda: len(list_pod_names(api)) == 2)
        failed = metrics.registry.get_sample_value("finetune_reconcile_seconds_count", {"result": "ClusterError"})
        assert (failed or 0) > 3
    # two warnings, because the pass between them succeeded and wrote the status
    assert [vars(record)["job"] for record in caplog.records] == ["default/a"] * 2


async def test_status_write_with_a_lost_response_is_detected_without_the_watch(
    api: HttpApi, controller: Controller
) -> None:
    api.faults.append(ScriptedFault("PUT", "finetunejobs", 0, after_execution=True))
    controller.on_job_event(put_job(api, "a"))
    await wait_in_event_loop(lambda: len(list_pod_names(api)) == 2)


async def test_retry_drops_a_job_that_was_replaced_by_a_job_of_the_same_name(
    api: HttpApi, controller: Controller
) -> None:
    api.faults.append(ScriptedFault("PUT", "finetunejobs", 500, times=3))
    controller.on_job_event(put_job(api, "a"))
    await wait_in_event_loop(lambda: api.find_requests("PUT", "finetunejobs") != [])
    api.remove("finetunejobs", "a")
    put_job(api, "a")
    await wait_in_event_loop(lambda: len(controller.jobs) == 0)
    assert list_pod_names(api) == []


async def test_an_unexpected_error_in_one_pass_does_not_stop_other_jobs(
    api: HttpApi, caplog: pytest.LogCaptureFixture
) -> None:
    calls = 0

    def read_broken_clock() -> datetime:
        nonlocal calls
        calls += 1
        return datetime.now(UTC) if calls > 2 else datetime.fromtimestamp(1 / 0, UTC)

    async with running_controller(api, now=read_broken_clock) as (controller, _):
        controller.on_job_event(put_job(api, "a"))
        controller.on_job_event(put_job(api, "b"))
        await wait_in_event_loop(lambda: len(list_pod_names(api)) == 4)
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 2
    assert all(error.exc_info for error in errors)


async def test_a_job_whose_status_write_returns_not_found_is_dropped(api: HttpApi, controller: Controller) -> None:
    deleted = put_job(api, "a")
    api.remove("finetunejobs", "a")
    controller.on_job_event(deleted)
    await wait_in_event_loop(lambda: len(controller.jobs) == 0)
    assert list_pod_names(api) == []


async def test_job_deleted_during_its_pass_stays_deleted(api: HttpApi) -> None:
    deleted = asyncio.Event()

    def delete_while_reading_the_clock() -> datetime:
        if not deleted.is_set():
            deleted.set()
            controller.on_job_deleted(get_job_key(job))
        return datetime.now(UTC)

    async with running_controller(api, now=delete_while_reading_the_clock) as (controller, _):
        job = put_job(api, "a")
        controller.on_job_event(job)
        await wait_in_event_loop(lambda: bool(api.find_requests("PUT", "finetunejobs")))
        await asyncio.sleep(0.3)
        assert len(controller.jobs) == 0


async def test_resync_detects_jobs_and_deletions_that_the_watch_missed(api: HttpApi) -> None:
    deleted = put_job(api, "deleted")
    async with running_controller(api) as (controller, _):
        api.remove("finetunejobs", "deleted", silently=True)
        put_job(api, "new")
        await controller.resync_jobs()
        assert get_job_key(deleted) not in controller.jobs
        await wait_in_event_loop(lambda: "new-0-0" in list_pod_names(api))


async def test_resync_compares_page_by_page(api: HttpApi) -> None:
    for number in range(JOB_PAGE_SIZE + 1):
        put_job(api, f"job-{number}")
    async with running_controller(api, is_leader=False) as (controller, _):
        assert len(controller.jobs) == JOB_PAGE_SIZE + 1
        api.remove("finetunejobs", "job-7", silently=True)
        await controller.resync_jobs()
        assert len(controller.jobs) == JOB_PAGE_SIZE


async def test_resync_detects_that_etcd_was_restored(api: HttpApi) -> None:
    put_job(api, "a")
    async with running_controller(api, is_leader=False) as (controller, _):
        api.restore(50)
        with pytest.raises(StateRolledBack, match="to 50"):
            await controller.resync_jobs()


async def test_resync_detects_a_restored_job_after_the_versions_have_caught_up(api: HttpApi) -> None:
    put_job(api, "a")
    async with running_controller(api, is_leader=False) as (controller, _):
        api.restore(50)
        put_job(api, "a", spec=spec(suspend=True))  # version 51
        api.restore(5000)
        with pytest.raises(StateRolledBack, match=r"default/a: .* to 51"):
            await controller.resync_jobs()


async def test_only_the_identity_of_the_ended_pods_of_a_finished_job_is_cached(api: HttpApi) -> None:
    async with running_controller(api, is_leader=False) as (controller, _):
        job = put_job(api, "a")
        controller.on_job_event(job)
        for rank in range(2):
            put_ended_pod(api, job, f"a-0-{rank}")
        await wait_in_event_loop(lambda: len(controller.children.pods(get_job_key(job))) == 2)
        assert all("spec" in pod for pod in controller.children.pods(get_job_key(job)))
        controller.on_job_event(put_job(api, "a", status={"completionTime": "2026-01-01T00:00:00Z"}))
        put_ended_pod(api, job, "a-0-2")
        await wait_in_event_loop(lambda: len(controller.children.pods(get_job_key(job))) == 3)
        [pod_informer, _] = controller.informers
        cached_pods = controller.children.pods(get_job_key(job))
        assert [set(pod) for pod in cached_pods] == [{"metadata", "status"}] * 3
        assert {id(pod) for pod in pod_informer._objects.values()} == {id(pod) for pod in cached_pods}


def put_ended_pod(api: HttpApi, job: RawBody, name: str) -> None:
    body = {"spec": {}, "status": {"phase": "Succeeded"}}
    api.put("pods", {"metadata": build_child_metadata(job, name), **body})


def build_child_metadata(job: RawBody, name: str) -> RawBody:
    uid = job["metadata"]["uid"]
    owner = {"apiVersion": names.API_VERSION, "kind": "FineTuneJob", "name": job["metadata"]["name"], "uid": uid}
    return {"name": name, "labels": {names.JOB_UID: uid}, "ownerReferences": [{**owner, "controller": True}]}


async def test_pods_of_an_unknown_job_are_cached_but_not_enqueued(api: HttpApi, controller: Controller) -> None:
    job = put_job(api, "a")
    api.put("pods", {"metadata": build_child_metadata(job, "a-7-0")})
    await wait_in_event_loop(lambda: len(controller.children.pods(get_job_key(job))) == 1)
    assert len(controller.queue) == 0


async def test_restarts_are_counted_by_namespace_and_reason() -> None:
    async with running_controller(HttpApi()) as (controller, metrics):
        failed = {"attempt": 0, "reason": "RankKilled", "fault": "infrastructure"}
        after = {"status": {"restarts": 1, "attempts": [failed, {"attempt": 1}]}}
        controller._count_restarts({}, {"metadata": {"namespace": "team"}, **after})
        controller._count_restarts(after, after)
        labels = {"namespace": "team", "reason": "RankKilled", "fault": "infrastructure"}
        assert metrics.registry.get_sample_value("finetune_job_restarts_total", labels) == 1


async def test_suspend_is_applied_to_a_job_whose_passes_fail_unexpectedly(
    api: HttpApi, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller.on_job_event(put_job(api, "a"))
    await wait_in_event_loop(lambda: len(list_pod_names(api)) == 2)

    async def fail(*_: object) -> None:
        raise OverflowError("date value out of range")

    monkeypatch.setattr("finetune_operator.controller.controller.reconcile", fail)
    status = api.objects["finetunejobs", "default", "a"]["status"]
    controller.on_job_event(put_job(api, "a", spec=spec(suspend=True), status=status))
    await wait_in_event_loop(lambda: len(api.find_requests("DELETE", "pods")) == 2)

    conditions = api.objects["finetunejobs", "default", "a"]["status"]["conditions"]
    [stalled] = [condition for condition in conditions if condition["type"] == "Stalled"]
    assert "OverflowError: date value out of range" in stalled["message"]


def find_condition(api: HttpApi, name: str) -> RawBody | None:
    conditions = api.objects["finetunejobs", "default", name].get("status", {}).get("conditions", ())
    return next((condition for condition in conditions if condition["type"] == "OperatorRestricted"), None)


def complete_job_fields() -> dict[str, Any]:
    """Return the fields of a job that completed long ago, and that is to be deleted at once."""
    end = {"reason": "Completed", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    condition = {"type": "Complete", "status": "True", "observedGeneration": 1, **end}
    status = {"phase": "Complete", "completionTime": "2026-01-01T00:00:00Z", "conditions": [condition]}
    return {"spec": spec(ttlSecondsAfterFinished=0), "status": status}


@pytest.mark.parametrize(
    ("right", "fields"),
    [
        pytest.param("get persistentvolumeclaims", {}, id="the pass fails"),
        pytest.param("list pods", {}, id="an uncached read fails"),
        pytest.param("create services", {}, id="a create is rejected"),
        pytest.param("watch pods", {}, id="a watch fails"),
        pytest.param("delete finetunejobs", complete_job_fields(), id="the job has finished"),
    ],
)
async def test_a_missing_right_is_a_condition_until_it_is_granted(
    api: HttpApi, controller: Controller, right: str, fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    api.refused_rights = {right}
    if right.startswith("watch"):
        api.close_watches()
        await wait_in_event_loop(lambda: bool(caplog.records))
    controller.on_job_event(put_job(api, "a", **fields))
    await wait_in_event_loop(lambda: find_condition(api, "a") is not None)
    condition = find_condition(api, "a")
    assert condition is not None
    assert (condition["status"], condition["reason"]) == ("True", "PermissionMissing")
    assert f"no permission to {right};" in condition["message"]
    if right == "create services":
        assert list_pod_names(api) == [], "no pod is created without the Service"

    api.refused_rights = set()
    if fields:
        await wait_in_event_loop(lambda: ("finetunejobs", "default", "a") not in api.objects)
    else:
        await wait_in_event_loop(lambda: len(list_pod_names(api)) == 2)
        controller.enqueue(get_job_key(api.objects["finetunejobs", "default", "a"]))
        await wait_in_event_loop(lambda: find_condition(api, "a") is None)
    named = [record for record in caplog.records if f"no permission to {right};" in record.getMessage()]
    assert len(named) == 1


async def test_a_missing_right_to_create_events_is_a_condition_of_a_job_that_runs(
    api: HttpApi, controller: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    controller.on_job_event(put_job(api, "a"))
    await wait_in_event_loop(lambda: len(list_pod_names(api)) == 2)
    api.refused_rights = {"create events"}
    for name in list_pod_names(api):
        state = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
        status = {"phase": "Running", "containerStatuses": [{"name": "trainer", "state": state}]}
        api.put("pods", {**api.objects["pods", "default", name], "status": status})
    await wait_in_event_loop(lambda: bool(caplog.records))
    controller.enqueue(get_job_key(api.objects["finetunejobs", "default", "a"]))
    await wait_in_event_loop(lambda: find_condition(api, "a") is not None)
    assert api.objects["finetunejobs", "default", "a"]["status"]["phase"] == "Running"
    assert len(caplog.records) == 1
