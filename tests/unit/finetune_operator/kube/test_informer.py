"""The informer against an API server in memory: nothing is missed, nothing is told twice, gaps are healed."""

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from finetune_operator.kube import api_client as apiserver
from finetune_operator.kube import credentials
from finetune_operator.kube import informer as informer_module
from finetune_operator.kube.informer import Informer
from testing.fakes.api_client import connected
from testing.fakes.dead_peer import deafen_connections
from testing.fakes.http_api import Fault, HttpApi

Raw = dict[str, Any]
LABELS = {"managed": "us"}


def put(api: HttpApi, name: str, *, namespace: str = "default", **body: Any) -> Raw:
    return api.put("pods", {"metadata": {"name": name, "labels": LABELS}, **body}, namespace=namespace)


class Heard:
    """What the informer told, as words, and what its listener believes is there."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.believed: dict[str, Raw] = {}
        self.last: list[Raw] = []

    def hear(self, before: Raw | None, after: Raw | None) -> None:
        body = after or before
        assert body is not None
        self.last.append(body)
        name = body["metadata"]["name"]
        verb = "deleted" if after is None else "added" if before is None else "changed"
        self.words.append(f"{verb} {name}")
        if after is None:
            del self.believed[body["metadata"]["uid"]]
        else:
            self.believed[body["metadata"]["uid"]] = after

    def agrees_with(self, api: HttpApi) -> bool:
        there = {body["metadata"]["uid"]: body["metadata"]["resourceVersion"] for body in api.objects.values()}
        return there == {uid: body["metadata"]["resourceVersion"] for uid, body in self.believed.items()}


@asynccontextmanager
async def following(api: HttpApi, path: str = "/api/v1/pods") -> AsyncIterator[tuple[Informer, Heard]]:
    heard = Heard()
    async with connected(api) as server:
        informer = Informer(server, path, selector="managed=us", on_change=heard.hear)
        task = asyncio.create_task(informer.run())
        try:
            async with asyncio.timeout(60):  # only a test that fails waits so long
                await informer.synced.wait()
            yield informer, heard
        finally:
            task.cancel()
            await asyncio.wait((task,))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):  # only a test that fails waits so long
        while not condition():  # noqa: ASYNC110  the server has no event for everything a test waits for
            await asyncio.sleep(0.005)


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(informer_module, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(apiserver, "PAUSES", (0.01, 0.01))


async def test_the_first_list_is_told_as_additions_before_synced() -> None:
    api = HttpApi()
    put(api, "a")
    put(api, "b")
    api.put("pods", {"metadata": {"name": "not ours"}})
    async with following(api) as (_, heard):
        assert heard.words == ["added a", "added b"]


async def test_listed_objects_carry_their_type_as_watched_ones_do() -> None:
    api = HttpApi()
    put(api, "a")
    async with following(api) as (_, heard):
        [body] = heard.believed.values()
        assert (body["kind"], body["apiVersion"]) == ("Pod", "v1")


async def test_a_long_list_comes_in_pages() -> None:
    api = HttpApi()
    for number in range(1201):
        put(api, f"p{number}")
    async with following(api) as (_, heard):
        assert len(heard.believed) == 1201
    assert len([r for r in api.asked("GET", "pods") if "watch" not in r.params]) == 3


async def test_changes_are_told_as_they_happen() -> None:
    api = HttpApi()
    async with following(api) as (_, heard):
        await until(lambda: api.watches == 1)
        put(api, "a")
        put(api, "a", status={"phase": "Running"})
        api.remove("pods", "a")
        await until(lambda: len(heard.words) == 3)
    assert heard.words == ["added a", "changed a", "deleted a"]


async def test_a_deletion_is_told_with_the_last_state() -> None:
    api = HttpApi()
    last: list[Raw | None] = []
    put(api, "a", status={"phase": "Failed"})
    async with connected(api) as server:
        informer = Informer(
            server, "/api/v1/pods", selector="managed=us", on_change=lambda before, _: last.append(before)
        )
        task = asyncio.create_task(informer.run())
        await until(lambda: api.watches == 1)
        api.remove("pods", "a")
        await until(lambda: len(last) == 2)
        task.cancel()
    assert last[1] is not None
    assert last[1]["status"] == {"phase": "Failed"}
    assert last[1]["metadata"]["resourceVersion"] == api.version


async def test_a_watch_that_ends_goes_on_where_it_ended() -> None:
    api = HttpApi()
    put(api, "a")
    async with following(api) as (_, heard):
        await until(lambda: api.watches == 1)
        api.end_watches()
        put(api, "b")  # before the next watch begins
        await until(lambda: len(heard.words) == 2)
    assert heard.words == ["added a", "added b"]
    assert len([r for r in api.asked("GET", "pods") if "watch" not in r.params]) == 1, "no second LIST"


async def test_a_bookmark_moves_the_place_to_go_on_from() -> None:
    api = HttpApi()
    async with following(api) as (_, heard):
        await until(lambda: api.watches == 1)
        api.compact()
        api.send({"type": "BOOKMARK", "object": {"kind": "Pod", "metadata": {"resourceVersion": api.version}}})
        await asyncio.sleep(0.05)
        api.end_watches()
        await until(lambda: len([r for r in api.asked("GET", "pods") if "watch" in r.params]) == 2)
        put(api, "a")
        await until(lambda: heard.words == ["added a"])
    assert len([r for r in api.asked("GET", "pods") if "watch" not in r.params]) == 1


async def test_a_deletion_in_a_gap_is_told_after_the_relist() -> None:
    api = HttpApi()
    put(api, "a")
    put(api, "b")
    async with following(api) as (_, heard):
        await until(lambda: api.watches == 1)
        api.remove("pods", "a", silently=True)
        put(api, "c")
        api.compact()
        api.end_watches()
        await until(lambda: "deleted a" in heard.words)
        await until(lambda: heard.agrees_with(api))
    assert heard.words == ["added a", "added b", "added c", "deleted a"]


async def test_an_object_replaced_in_a_gap_is_a_deletion_and_an_addition() -> None:
    api = HttpApi()
    put(api, "a")
    async with following(api) as (_, heard):
        await until(lambda: api.watches == 1)
        api.remove("pods", "a", silently=True)
        api.compact()
        api.objects["pods", "default", "a"] = {
            "metadata": {"name": "a", "namespace": "default", "labels": LABELS, "uid": "new", "resourceVersion": "999"}
        }
        api.end_watches()
        await until(lambda: len(heard.words) == 3)
    assert heard.words == ["added a", "deleted a", "added a"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can make a connection deaf")
async def test_a_connection_that_the_network_forgot_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before the next bookmark is overdue, which takes longer than this test waits."""
    quick = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 1, "TCP_USER_TIMEOUT": 1000}
    monkeypatch.setattr(credentials, "TCP_OPTIONS", quick)
    api = HttpApi()
    async with following(api) as (_, heard):
        await until(lambda: api.watches == 1)
        assert deafen_connections(os.getpid())
        put(api, "meanwhile")
        await until(lambda: heard.words == ["added meanwhile"])


async def test_an_error_event_other_than_gone_is_survived() -> None:
    api = HttpApi()
    async with following(api) as (_, heard):
        await until(lambda: api.watches == 1)
        api.send({"type": "ERROR", "object": {"kind": "Status", "code": 500, "message": "etcd is away"}})
        put(api, "a")
        await until(lambda: heard.words == ["added a"])


@pytest.mark.parametrize("status", [pytest.param(0, id="connection cut"), 429, 403, 410, 500, 503])
async def test_lists_and_watches_are_tried_again(status: int) -> None:
    api = HttpApi()
    put(api, "a")
    api.faults.append(Fault("GET", "pods", status, times=5))
    async with following(api) as (informer, heard):
        assert heard.words == ["added a"]
        await until(lambda: api.watches == 1)
        api.faults.append(Fault("GET", "pods", status, times=5))
        api.end_watches()
        put(api, "b")
        await until(lambda: heard.agrees_with(api))
        assert informer.silent_seconds() < 5


async def test_a_right_that_is_missing_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    api = HttpApi()
    api.faults.append(Fault("GET", "pods", 403, times=4))
    with caplog.at_level(logging.WARNING):
        async with following(api):
            pass

    (record,) = caplog.records
    assert (record.levelname, vars(record)["failures"]) == ("WARNING", 1)


async def test_an_object_that_loses_our_label_is_gone_for_us() -> None:
    api = HttpApi()
    before = put(api, "a")
    async with following(api) as (_, heard):
        await until(lambda: api.watches == 1)
        api.send({"type": "DELETED", "object": before})
        await until(lambda: heard.words == ["added a", "deleted a"])


async def test_one_namespace_hears_nothing_of_another() -> None:
    api = HttpApi()
    put(api, "a", namespace="one")
    put(api, "b", namespace="two")
    async with following(api, "/api/v1/namespaces/one/pods") as (_, heard):
        await until(lambda: api.watches == 1)
        put(api, "c", namespace="two")
        put(api, "d", namespace="one")
        await until(lambda: len(heard.words) == 2)
    assert heard.words == ["added a", "added d"]


async def test_who_changed_which_field_is_not_kept() -> None:
    api = HttpApi()
    api.put("pods", {"metadata": {"name": "a", "labels": LABELS, "managedFields": [{"manager": "kubelet"}]}})
    async with following(api) as (_, heard):
        [body] = heard.believed.values()
        assert "managedFields" not in body["metadata"]


async def test_an_object_of_a_megabyte_fits_into_a_watch() -> None:
    api = HttpApi()
    async with following(api) as (_, heard):
        await until(lambda: api.watches == 1)
        put(api, "a", spec={"args": ["x" * 1_500_000]})
        await until(lambda: heard.words == ["added a"])
