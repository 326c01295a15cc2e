"""Tests of the informer against an in-memory API server."""

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from finetune_operator.kube import api_client, credentials
from finetune_operator.kube import informer as informer_module
from finetune_operator.kube.api_paths import ApiPath, collection_path
from finetune_operator.kube.informer import Informer
from finetune_operator.kube.resource_versions import StateRolledBack
from finetune_operator.observation.ownership import RawBody
from testing.fakes.api_client import serve_and_connect
from testing.fakes.dead_peer import drop_incoming_packets_of_process
from testing.fakes.http_api import HttpApi, ScriptedFault
from testing.processes.waiting import wait_in_event_loop

LABELS = {"managed": "test"}
PODS_PATH = collection_path("Pod", None)


def put_pod(api: HttpApi, name: str, *, namespace: str = "default", **body: Any) -> RawBody:
    return api.put("pods", {"metadata": {"name": name, "labels": LABELS}, **body}, namespace=namespace)


class ChangeRecorder:
    """Records the changes that the informer reports, and applies them to a set of objects."""

    def __init__(self) -> None:
        self.changes: list[str] = []
        self.objects: dict[str, RawBody] = {}

    def record(self, old_body: RawBody | None, new_body: RawBody | None) -> None:
        body = new_body or old_body
        assert body is not None
        name = body["metadata"]["name"]
        verb = "deleted" if new_body is None else "added" if old_body is None else "changed"
        self.changes.append(f"{verb} {name}")
        if new_body is None:
            del self.objects[body["metadata"]["uid"]]
        else:
            self.objects[body["metadata"]["uid"]] = new_body

    def has_same_objects(self, api: HttpApi) -> bool:
        versions = {body["metadata"]["uid"]: body["metadata"]["resourceVersion"] for body in api.objects.values()}
        return versions == {uid: body["metadata"]["resourceVersion"] for uid, body in self.objects.items()}


@asynccontextmanager
async def running_informer(api: HttpApi, path: ApiPath = PODS_PATH) -> AsyncIterator[tuple[Informer, ChangeRecorder]]:
    recorder = ChangeRecorder()
    async with serve_and_connect(api) as server:
        informer = Informer(server, path, selector="managed=test", on_change=recorder.record)
        task = asyncio.create_task(informer.run())
        try:
            async with asyncio.timeout(60):  # only reached if the test fails
                await informer.synced.wait()
            await wait_in_event_loop(lambda: api.open_watch_count == 1)
            yield informer, recorder
        finally:
            task.cancel()
            await asyncio.wait((task,))


@pytest.fixture(autouse=True)
def _shorten_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(informer_module, "INITIAL_BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr(api_client, "RETRY_DELAYS_SECONDS", (0.01, 0.01))


async def test_first_list_is_reported_as_additions_before_synced_is_set(api: HttpApi) -> None:
    put_pod(api, "a")
    put_pod(api, "b")
    api.put("pods", {"metadata": {"name": "unlabelled"}})
    async with running_informer(api) as (_, recorder):
        assert recorder.changes == ["added a", "added b"]


async def test_listed_objects_have_kind_and_api_version(api: HttpApi) -> None:
    put_pod(api, "a")
    async with running_informer(api) as (_, recorder):
        [body] = recorder.objects.values()
        assert (body["kind"], body["apiVersion"]) == ("Pod", "v1")


async def test_a_long_list_is_read_in_pages(api: HttpApi) -> None:
    for number in range(1201):
        put_pod(api, f"p{number}")
    async with running_informer(api) as (_, recorder):
        assert len(recorder.objects) == 1201
    assert len([r for r in api.find_requests("GET", "pods") if "watch" not in r.params]) == 3


async def test_changes_of_an_object_are_reported_in_order(api: HttpApi) -> None:
    async with running_informer(api) as (_, recorder):
        put_pod(api, "a")
        put_pod(api, "a", status={"phase": "Running"})
        api.remove("pods", "a")
        await wait_in_event_loop(lambda: len(recorder.changes) == 3)
    assert recorder.changes == ["added a", "changed a", "deleted a"]


async def test_a_deletion_is_reported_with_the_last_state(api: HttpApi) -> None:
    reported: list[RawBody | None] = []
    put_pod(api, "a", status={"phase": "Failed"})
    async with serve_and_connect(api) as server:
        informer = Informer(
            server, PODS_PATH, selector="managed=test", on_change=lambda before, _: reported.append(before)
        )
        task = asyncio.create_task(informer.run())
        await wait_in_event_loop(lambda: api.open_watch_count == 1)
        api.remove("pods", "a")
        await wait_in_event_loop(lambda: len(reported) == 2)
        task.cancel()
    assert reported[1] is not None
    assert reported[1]["status"] == {"phase": "Failed"}
    assert reported[1]["metadata"]["resourceVersion"] == api.version


async def test_a_new_watch_continues_at_the_version_of_the_previous_one(api: HttpApi) -> None:
    put_pod(api, "a")
    async with running_informer(api) as (_, recorder):
        api.close_watches()
        put_pod(api, "b")  # this change is made between two watches
        await wait_in_event_loop(lambda: len(recorder.changes) == 2)
    assert recorder.changes == ["added a", "added b"]
    assert len([r for r in api.find_requests("GET", "pods") if "watch" not in r.params]) == 1, "no second LIST"


async def test_a_bookmark_advances_the_version_of_the_next_watch(api: HttpApi) -> None:
    async with running_informer(api) as (informer, recorder):
        api.compact()
        api.send({"type": "BOOKMARK", "object": {"kind": "Pod", "metadata": {"resourceVersion": api.version}}})
        await wait_in_event_loop(lambda: informer._version == str(api.version))
        api.close_watches()
        await wait_in_event_loop(lambda: len([r for r in api.find_requests("GET", "pods") if "watch" in r.params]) == 2)
        put_pod(api, "a")
        await wait_in_event_loop(lambda: recorder.changes == ["added a"])
    assert len([r for r in api.find_requests("GET", "pods") if "watch" not in r.params]) == 1


async def test_object_replaced_between_two_watches_is_reported_as_deletion_and_addition(api: HttpApi) -> None:
    put_pod(api, "a")
    async with running_informer(api) as (_, recorder):
        api.remove("pods", "a", silently=True)
        api.compact()
        api.objects["pods", "default", "a"] = {
            "metadata": {"name": "a", "namespace": "default", "labels": LABELS, "uid": "new", "resourceVersion": "999"}
        }
        api.close_watches()
        await wait_in_event_loop(lambda: len(recorder.changes) == 3)
    assert recorder.changes == ["added a", "deleted a", "added a"]


@pytest.mark.skipif(sys.platform != "linux", reason="the connection can be cut silently on Linux only")
async def test_silently_dropped_connection_is_detected_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """TCP keepalive detects a dropped connection long before the next bookmark is overdue."""
    short_timeouts = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 1, "TCP_USER_TIMEOUT": 1000}
    monkeypatch.setattr(credentials, "TCP_OPTIONS", short_timeouts)
    api = HttpApi()
    async with running_informer(api) as (_, recorder):
        dropped = drop_incoming_packets_of_process(os.getpid())
        if not dropped and os.geteuid() != 0:
            pytest.skip("this system lets only root attach a filter to a socket")
        assert dropped
        put_pod(api, "meanwhile")
        await wait_in_event_loop(lambda: recorder.changes == ["added meanwhile"])


async def test_informer_recovers_from_error_events_other_than_410(api: HttpApi) -> None:
    async with running_informer(api) as (_, recorder):
        api.send({"type": "ERROR", "object": {"kind": "Status", "code": 500, "message": "etcd is unavailable"}})
        put_pod(api, "a")
        await wait_in_event_loop(lambda: recorder.changes == ["added a"])


@pytest.mark.parametrize("status", [pytest.param(0, id="connection cut"), 429, 403, 410, 500, 503])
async def test_failed_lists_and_watches_are_retried(api: HttpApi, status: int) -> None:
    put_pod(api, "a")
    api.faults.append(ScriptedFault("GET", "pods", status, times=4))  # a request is sent up to three times
    async with running_informer(api) as (informer, recorder):
        assert recorder.changes == ["added a"]
        await wait_in_event_loop(lambda: api.open_watch_count == 1)
        api.faults.append(ScriptedFault("GET", "pods", status, times=4))
        api.close_watches()
        put_pod(api, "b")
        await wait_in_event_loop(lambda: recorder.has_same_objects(api))
        assert informer.seconds_since_activity() < 5


async def test_a_missing_permission_is_logged_once(api: HttpApi, caplog: pytest.LogCaptureFixture) -> None:
    api.faults.append(ScriptedFault("GET", "pods", 403, times=4))
    with caplog.at_level(logging.WARNING):
        async with running_informer(api):
            pass

    (record,) = caplog.records
    assert (record.levelname, vars(record)["failures"]) == ("WARNING", 1)


async def test_changes_in_other_namespaces_are_not_reported(api: HttpApi) -> None:
    put_pod(api, "a", namespace="one")
    put_pod(api, "b", namespace="two")
    async with running_informer(api, collection_path("Pod", "one")) as (_, recorder):
        put_pod(api, "c", namespace="two")
        put_pod(api, "d", namespace="one")
        await wait_in_event_loop(lambda: len(recorder.changes) == 2)
    assert recorder.changes == ["added a", "added d"]


async def test_only_the_projection_of_an_object_is_cached_and_reported(api: HttpApi) -> None:
    def project(body: RawBody) -> RawBody:
        return {"metadata": {name: body["metadata"][name] for name in ("name", "uid", "resourceVersion")}}

    put_pod(api, "listed", spec={"nodeName": "n"})
    recorder = ChangeRecorder()
    async with serve_and_connect(api) as server:
        informer = Informer(server, PODS_PATH, selector="managed=test", on_change=recorder.record, project=project)
        task = asyncio.create_task(informer.run())
        await wait_in_event_loop(lambda: api.open_watch_count == 1)
        put_pod(api, "watched", spec={"nodeName": "n"})
        await wait_in_event_loop(lambda: len(recorder.objects) == 2)
        task.cancel()
    for cached in (recorder.objects, informer._objects):
        assert [set(body) for body in cached.values()] == [{"metadata"}, {"metadata"}]


async def test_a_change_of_fields_that_are_not_cached_is_not_reported(api: HttpApi) -> None:
    def project(body: RawBody) -> RawBody:
        metadata = {name: body["metadata"][name] for name in ("name", "uid", "resourceVersion")}
        return {"metadata": metadata, "phase": body["phase"]}

    put_pod(api, "first", phase="Pending", ready=False)
    recorder = ChangeRecorder()
    async with serve_and_connect(api) as server:
        informer = Informer(server, PODS_PATH, selector="managed=test", on_change=recorder.record, project=project)
        task = asyncio.create_task(informer.run())
        await wait_in_event_loop(lambda: api.open_watch_count == 1)
        put_pod(api, "first", phase="Pending", ready=True)
        newest = put_pod(api, "first", phase="Running", ready=True)
        await wait_in_event_loop(lambda: recorder.changes == ["added first", "changed first"])
        task.cancel()
    [reported], [cached] = recorder.objects.values(), informer._objects.values()
    assert (reported["phase"], cached["metadata"]["resourceVersion"]) == (
        "Running",
        newest["metadata"]["resourceVersion"],
    )


async def test_a_replacement_of_another_version_is_ignored(api: HttpApi) -> None:
    pod = put_pod(api, "a")
    async with running_informer(api) as (informer, recorder):
        uid, metadata = pod["metadata"]["uid"], pod["metadata"]
        informer.replace({"metadata": {**metadata, "resourceVersion": "1"}})
        informer.replace({"metadata": {**metadata, "uid": "unknown"}})
        assert informer._objects[uid]["kind"] == "Pod"
        informer.replace({"metadata": metadata})
        assert informer._objects == {uid: {"metadata": metadata}}
    assert recorder.changes == ["added a"]


async def test_a_list_older_than_an_earlier_response_ends_the_informer(api: HttpApi) -> None:
    put_pod(api, "a")
    async with serve_and_connect(api) as server:
        informer = Informer(server, PODS_PATH, selector="managed=test", on_change=lambda *_: None)
        task = asyncio.create_task(informer.run())
        await wait_in_event_loop(lambda: api.open_watch_count == 1)
        api.faults.append(ScriptedFault("GET", "pods", 410))
        api.restore(50)
        with pytest.raises(StateRolledBack, match="went back from resourceVersion 101 to 50"):
            await asyncio.wait_for(task, 60)


async def test_a_watch_without_a_bookmark_is_followed_by_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restore of etcd, a watch at a version of the lost state delivers nothing."""
    monkeypatch.setattr(api_client, "WATCH_READ_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(informer_module, "WATCH_READ_TIMEOUT_SECONDS", 0.2)
    api = HttpApi()
    async with running_informer(api):
        await wait_in_event_loop(
            lambda: len([r for r in api.find_requests("GET", "pods") if "watch" not in r.params]) == 2
        )


async def test_watch_delivers_objects_of_one_megabyte(api: HttpApi) -> None:
    async with running_informer(api) as (_, recorder):
        put_pod(api, "a", spec={"args": ["x" * 1_500_000]})
        await wait_in_event_loop(lambda: recorder.changes == ["added a"])
