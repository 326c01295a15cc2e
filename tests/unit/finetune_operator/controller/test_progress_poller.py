"""What pods answer to the operator, and whom it asks. The answers come from real HTTP servers."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from finetune_api.v1alpha1.status import Progress
from finetune_operator import names
from finetune_operator.controller.child_cache import Children, JobKey
from finetune_operator.controller.job_cache import Jobs
from finetune_operator.controller.progress_poller import (
    LARGEST_ANSWER,
    SILENCE,
    ProgressPoller,
    ask,
    find_address,
    parse_status,
)

Raw = dict[str, Any]
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
KEY = JobKey("default", "u")


def pod(*, rank: int = 0, attempt: int = 1, phase: str = "Running", address: str = "127.0.0.1", uid: str = "p") -> Raw:
    labels = {names.JOB_UID: "u", names.ATTEMPT: str(attempt), names.NODE_RANK: str(rank)}
    metadata = {"name": "a", "namespace": "default", "uid": uid, "labels": labels}
    return {"metadata": metadata, "status": {"phase": phase, "podIP": address}}


@asynccontextmanager
async def answering(answer: Answer) -> AsyncIterator[int]:
    app = web.Application()
    app.router.add_get("/status", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield runner.addresses[0][1]
    await runner.cleanup()


async def ask_server(answer: Answer, *, patience: float = 2.0) -> Progress | None:
    limit = aiohttp.ClientTimeout(total=patience)
    async with answering(answer) as port, aiohttp.ClientSession(timeout=limit) as session:
        said = await ask(session, f"http://127.0.0.1:{port}/status")
        return said.progress if said else None


def test_progress_is_read_as_the_contract_has_it() -> None:
    said = {
        "phase": "train",
        "progress": {"step": 7, "totalSteps": 70, "loss": 1.5, "updateTime": "2026-01-01T11:00:00Z"},
    }
    progress = parse_status(json.dumps(said).encode(), now=NOW)
    assert progress == Progress(step=7, total_steps=70, loss=1.5, update_time=datetime(2026, 1, 1, 11, tzinfo=UTC))


def test_an_answer_without_time_is_of_now() -> None:
    assert parse_status(b'{"progress": {"step": 1}}', now=NOW) == Progress(step=1, update_time=NOW)


def test_numbers_that_are_none_do_not_reach_the_status() -> None:
    progress = parse_status(b'{"progress": {"step": 1, "loss": NaN, "gradNorm": Infinity, "epoch": 0.5}}', now=NOW)
    assert progress == Progress(step=1, epoch=0.5, update_time=NOW)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"<html>", id="no JSON"),
        pytest.param(b"[]", id="no object"),
        pytest.param(b'{"phase": "init"}', id="no progress yet"),
        pytest.param(b'{"progress": null}', id="null"),
        pytest.param(b'{"progress": {"step": "many"}}', id="wrong type"),
        pytest.param(b"[" * 60_000, id="nested too deeply"),
        pytest.param(b"\xff\xfe{", id="no text"),
    ],
)
def test_an_answer_that_is_none_is_no_progress(content: bytes) -> None:
    assert parse_status(content, now=NOW) is None


async def test_a_pod_that_answers_is_heard() -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"progress": {"step": 3}})

    progress = await ask_server(answer)
    assert progress is not None
    assert progress.step == 3


async def test_a_pod_that_is_slow_is_not_waited_for() -> None:
    async def answer(_: web.Request) -> web.Response:
        await asyncio.sleep(5)
        return web.json_response({"progress": {"step": 3}})

    assert await ask_server(answer, patience=0.1) is None


async def test_a_pod_that_talks_too_much_is_cut_short() -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=b'{"progress": {"step": 3}, "x": "' + b"x" * LARGEST_ANSWER + b'"}')

    assert await ask_server(answer) is None


async def test_a_pod_cannot_send_the_operator_elsewhere() -> None:
    async def answer(request: web.Request) -> web.Response:
        if "again" in request.query:
            return web.json_response({"progress": {"step": 3}})
        raise web.HTTPFound("/status?again=1")

    assert await ask_server(answer) is None


async def test_nobody_at_the_address_is_no_answer() -> None:
    async with aiohttp.ClientSession() as session:
        assert await ask(session, "http://127.0.0.1:1/status") is None


@pytest.mark.parametrize(
    ("pods", "address"),
    [
        pytest.param((), None, id="no pod"),
        pytest.param((pod(rank=1), pod(rank=0, address="10.0.0.2")), "10.0.0.2", id="rank 0 of two"),
        pytest.param((pod(attempt=0),), None, id="of an older attempt"),
        pytest.param((pod(phase="Pending"),), None, id="not running yet"),
        pytest.param((pod(address=""),), None, id="no address yet"),
        pytest.param((pod(address="fd00::2"),), "[fd00::2]", id="IPv6"),
    ],
)
def test_rank_zero_of_the_present_attempt_is_asked(pods: tuple[Raw, ...], address: str | None) -> None:
    assert find_address(pods, attempt=1) == address


class Scene:
    """A poller with one job of one running pod, which answers on a port of its own."""

    def __init__(self, port: int) -> None:
        self.clock = 0.0
        self.woken: list[JobKey] = []
        self.jobs = Jobs()
        metadata = {"name": "a", "namespace": "default", "uid": "u", "resourceVersion": "1"}
        self.jobs.offer({"metadata": metadata, "status": {"attempt": 1}})
        self.children = Children(on_change=lambda _: None, present_attempt=self.jobs.attempt)
        self.children.pod_changed(None, pod())
        self.poller = ProgressPoller(
            self.jobs, self.children, on_progress=self.woken.append, port=port, clock=lambda: self.clock
        )

    async def ask(self) -> None:
        async with aiohttp.ClientSession() as session:
            await self.poller.ask_all(session)


async def test_a_job_is_woken_when_it_advanced_and_only_then() -> None:
    steps = iter((1, 1, 2))

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"progress": {"step": next(steps)}})

    async with answering(answer) as port:
        scene = Scene(port)
        for expected in (1, 1, 2):
            await scene.ask()
            assert len(scene.woken) == expected
    newest = scene.poller.newest(KEY)
    assert newest is not None
    assert newest.step == 2


async def test_silence_changes_nothing() -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"progress": {"step": 1}})

    async with answering(answer) as port:
        scene = Scene(port)
        await scene.ask()
    await scene.ask()  # nobody there any more
    newest = scene.poller.newest(KEY)
    assert newest is not None
    assert (newest.step, len(scene.woken)) == (1, 1)


async def test_who_is_silent_for_long_is_told_once_and_no_more_when_there_is_an_answer() -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({})  # no progress, which is no silence

    async with answering(answer) as port:
        scene = Scene(port)
    told = []
    for seconds in (0.0, SILENCE - 1, SILENCE, SILENCE + 10):
        scene.clock = seconds
        await scene.ask()
        told.append((scene.poller.unheard(KEY), len(scene.woken)))
    silent = f"127.0.0.1:{port}"
    assert told == [("", 0), ("", 0), (silent, 1), (silent, 1)]

    async with answering(answer) as port:
        scene.poller._port = port
        await scene.ask()
    assert (scene.poller.unheard(KEY), len(scene.woken)) == ("", 2)


async def test_a_new_attempts_pod_is_given_its_own_time() -> None:
    scene = Scene(1)
    await scene.ask()
    scene.children.pod_changed(pod(), pod(address="127.0.0.2"))
    scene.clock = SILENCE
    await scene.ask()
    assert (scene.poller.unheard(KEY), scene.woken) == ("", [])
    scene.clock = 2 * SILENCE
    await scene.ask()
    assert scene.poller.unheard(KEY) == "127.0.0.2:1"
    scene.children.pod_changed(pod(address="127.0.0.2"), None)
    await scene.ask()
    assert scene.poller.unheard(KEY) == ""


async def test_a_job_that_went_while_it_was_asked_is_not_remembered() -> None:
    async def answer(_: web.Request) -> web.Response:
        scene.jobs.drop(KEY)
        return web.json_response({"progress": {"step": 1}})

    async with answering(answer) as port:
        scene = Scene(port)
        await scene.ask()
    assert scene.poller.newest(KEY) is None
    assert scene.woken == []


async def test_pods_are_asked_again_and_again() -> None:
    asked = asyncio.Semaphore(0)

    async def answer(_: web.Request) -> web.Response:
        asked.release()
        return web.json_response({})

    async with answering(answer) as port:
        running = asyncio.create_task(Scene(port).poller.run(interval=0.01))
        async with asyncio.timeout(5):
            for _ in range(3):
                await asked.acquire()
        running.cancel()
