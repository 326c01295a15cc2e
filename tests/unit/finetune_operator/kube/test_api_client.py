"""Tests of the encoding of requests, and of the limits of concurrent ones while an admission webhook is slow."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from finetune_operator.kube import api_client
from finetune_operator.kube.api_client import (
    MAX_CREATES,
    MAX_OBJECT_BYTES,
    MAX_OTHER_REQUESTS,
    MAX_PAGE_BYTES,
    ApiClient,
    ResponseTooLarge,
    encode_json,
)
from finetune_operator.kube.api_paths import collection_path, extend_path, object_path
from finetune_operator.kube.credentials import ClusterCredentials, open_session
from testing.fakes.http_api import build_status_response

STATUS_PATH = object_path("FineTuneJob", "other", "a", "status")
PODS_PATH = collection_path("Pod", "slow")


class SlowWebhook:
    """Server that answers creates only after `release` is set, and other requests at once."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.open_creates = 0
        self.most_open_creates = 0

    async def respond(self, request: web.Request) -> web.Response:
        if request.method == "POST":
            self.open_creates += 1
            self.most_open_creates = max(self.most_open_creates, self.open_creates)
            await self.release.wait()
            self.open_creates -= 1
        return web.json_response({"method": request.method})


class RejectingWebhook(SlowWebhook):
    """Server that rejects every request."""

    async def respond(self, request: web.Request) -> web.Response:
        return build_status_response(403, "Forbidden", f"{request.method} denied")


@asynccontextmanager
async def connect_to(webhook: SlowWebhook) -> AsyncIterator[ApiClient]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", webhook.respond)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with open_session(ClusterCredentials(server=url), connections=0) as session:
            yield ApiClient(url, request_session=session, watch_session=session)
    finally:
        await runner.cleanup()


async def wait_for_open_creates(webhook: SlowWebhook) -> None:
    async with asyncio.timeout(30):  # only reached if the test fails
        while webhook.open_creates < MAX_CREATES - 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_status_writes_and_deletes_do_not_wait_for_slow_creates() -> None:
    webhook = SlowWebhook()
    async with connect_to(webhook) as client:
        creates = [asyncio.create_task(client.call("POST", PODS_PATH, body={})) for _ in range(3 * MAX_CREATES)]
        await wait_for_open_creates(webhook)
        others = [client.call("PUT", STATUS_PATH, body={}) for _ in range(2 * MAX_OTHER_REQUESTS)]
        async with asyncio.timeout(30):  # only reached if the test fails
            await asyncio.gather(*others, client.call("DELETE", extend_path(PODS_PATH, "a")))
        assert not any(create.done() for create in creates)
        webhook.release.set()
        await asyncio.gather(*creates)
    assert webhook.most_open_creates == MAX_CREATES - 1


async def test_the_timeout_of_a_request_does_not_include_the_wait_for_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_client, "REQUEST_TIMEOUT", aiohttp.ClientTimeout(total=0.5))
    monkeypatch.setattr(api_client, "MAX_CREATES", 1)
    webhook = SlowWebhook()
    async with connect_to(webhook) as client:
        webhook.release.set()
        async with client._create_slots.hold("default"):  # the only slot is in use for longer than the timeout
            waiting_create = asyncio.create_task(client.call_once("POST", PODS_PATH, body={}))
            await asyncio.sleep(1.0)
        assert await waiting_create == {"method": "POST"}


async def test_a_slot_is_free_again_after_an_error() -> None:
    async with connect_to(RejectingWebhook()) as client:
        for _ in range(MAX_CREATES + 1):
            with pytest.raises(api_client.ApiError, match="denied"):
                await asyncio.wait_for(client.call("POST", PODS_PATH, body={}), timeout=30)


class LargeObjects(SlowWebhook):
    """Server with ten large objects; `?limit=n` lists n of them, and other paths are one."""

    object_bytes = MAX_PAGE_BYTES // 3

    async def respond(self, request: web.Request) -> web.Response:
        if "limit" not in request.query:
            return web.json_response({"x": "y" * MAX_OBJECT_BYTES})
        first, size = int(request.query.get("continue", 0)), int(request.query["limit"])
        items = [{"x": "y" * self.object_bytes}] * min(size, 10 - first)
        following = str(first + size) if first + size < 10 else ""
        return web.json_response({"metadata": {"continue": following}, "items": items})


async def test_a_large_object_is_refused_and_a_large_page_is_read_in_parts() -> None:
    objects = LargeObjects()
    async with connect_to(objects) as client:
        with pytest.raises(ResponseTooLarge, match="pods/a: the response is too large"):
            await client.call("GET", extend_path(PODS_PATH, "a"))
        pages = [len(page["items"]) async for page in client.list_pages(PODS_PATH)]
        assert (sum(pages), max(pages)) == (10, 1)
        objects.object_bytes = MAX_PAGE_BYTES
        with pytest.raises(ResponseTooLarge):
            await anext(client.list_pages(PODS_PATH))


async def test_a_namespace_with_slow_creates_leaves_a_slot_for_others() -> None:
    webhook = SlowWebhook()
    async with connect_to(webhook) as client:
        creates = [asyncio.create_task(client.call("POST", PODS_PATH, body={})) for _ in range(2 * MAX_CREATES)]
        await wait_for_open_creates(webhook)
        other = asyncio.create_task(client.call("POST", collection_path("Pod", "other"), body={}))
        async with asyncio.timeout(30):
            while webhook.open_creates < MAX_CREATES:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        webhook.release.set()
        await asyncio.gather(other, *creates)


def test_texts_are_encoded_in_utf_8() -> None:
    assert encode_json({"message": "训练"}) == '{"message":"训练"}'.encode()


def test_lone_surrogates_are_replaced() -> None:
    assert encode_json({"message": "\ud800"}) == b'{"message":"?"}'
