"""Tests of the progress poller against real HTTP servers."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import aiohttp
import pytest
from aiohttp import web

from finetune_api.v1alpha1.status import Progress
from finetune_operator import names
from finetune_operator.controller import progress_poller
from finetune_operator.controller.child_cache import ChildCache, JobKey
from finetune_operator.controller.job_cache import JobCache
from finetune_operator.controller.progress_poller import (
    MAX_RESPONSE_BYTES,
    UNREACHABLE_AFTER_SECONDS,
    PolledDegradations,
    ProgressPoller,
    fetch_status,
    find_rank_zero_host,
    find_rank_zero_port,
    parse_status,
)
from finetune_operator.observation.ownership import JobOwner, RawBody
from finetune_operator.observation.projection import project_pod
from finetune_supervisor.messages import Degradation
from testing.processes.ip_support import LOOPBACK_ADDRESSES

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
KEY = JobKey("default", "u")


def pod(
    *, rank: int = 0, attempt: int = 1, phase: str = "Running", address: str = "127.0.0.1", uid: str = "p"
) -> RawBody:
    labels = {names.JOB_UID: "u", names.ATTEMPT: str(attempt), names.NODE_RANK: str(rank)}
    owner = {"apiVersion": names.API_VERSION, "kind": "FineTuneJob", "name": "a", "uid": "u", "controller": True}
    metadata = {
        "name": f"a-{attempt}-{rank}",
        "namespace": "default",
        "uid": uid,
        "labels": labels,
        "ownerReferences": [owner],
    }
    return {"metadata": metadata, "status": {"phase": phase, "podIP": address}}


def status_response(**fields: object) -> web.Response:
    """Return a response of the supervisor of attempt 1 of the job."""
    return web.json_response({"uid": "u", "attempt": 1, **fields})


def parse(content: bytes, *, job_uid: str = "u", attempt: int = 1) -> Progress | None:
    return parse_status(content, job_uid=job_uid, attempt=attempt, now=NOW).progress


@asynccontextmanager
async def run_status_server(handler: Handler, *, address: str = "127.0.0.1") -> AsyncIterator[int]:
    app = web.Application()
    app.router.add_get("/status", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, address, 0).start()
    yield runner.addresses[0][1]
    await runner.cleanup()


async def fetch_progress(handler: Handler, *, timeout_seconds: float = 2.0) -> Progress | None:
    timeout = aiohttp.ClientTimeout(total=timeout_seconds)
    async with run_status_server(handler) as port, aiohttp.ClientSession(timeout=timeout) as session:
        response = await fetch_status(session, f"http://127.0.0.1:{port}/status", job_uid="u", attempt=1)
        return response.progress if response else None


def test_status_response_is_parsed_into_progress() -> None:
    status = {
        "uid": "u",
        "attempt": 1,
        "phase": "train",
        "progress": {"step": 7, "totalSteps": 70, "loss": 1.5, "updateTime": "2026-01-01T11:00:00Z"},
    }
    progress = parse(json.dumps(status).encode())
    assert progress == Progress(step=7, total_steps=70, loss=1.5, update_time=datetime(2026, 1, 1, 11, tzinfo=UTC))


def test_progress_without_update_time_gets_the_current_time() -> None:
    assert parse(b'{"uid": "u", "attempt": 1, "progress": {"step": 1}}') == Progress(step=1, update_time=NOW)


def test_non_finite_numbers_are_dropped() -> None:
    fields = b'"step": 1, "loss": NaN, "gradNorm": Infinity, "epoch": 0.5'
    progress = parse(b'{"uid": "u", "attempt": 1, "progress": {' + fields + b"}}")
    assert progress == Progress(step=1, epoch=0.5, update_time=NOW)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"<html>", id="not JSON"),
        pytest.param(b"[]", id="not an object"),
        pytest.param(b'{"uid": "u", "attempt": 1, "phase": "init"}', id="no progress yet"),
        pytest.param(b'{"uid": "u", "attempt": 1, "progress": null}', id="null"),
        pytest.param(b'{"uid": "u", "attempt": 1, "progress": {"step": "many"}}', id="wrong type"),
        pytest.param(b"[" * 60_000, id="nested too deeply"),
        pytest.param(b"\xff\xfe{", id="not UTF-8"),
    ],
)
def test_invalid_response_is_ignored(content: bytes) -> None:
    assert parse(content) is None


@pytest.mark.parametrize(
    ("job_uid", "attempt"), [pytest.param("another", 1, id="another job"), pytest.param("u", 2, id="another attempt")]
)
def test_response_of_another_pod_is_ignored(job_uid: str, attempt: int) -> None:
    """A pod IP is reused soon after its pod is deleted, and the cache may be behind."""
    content = b'{"uid": "u", "attempt": 1, "progress": {"step": 1}}'

    assert parse(content) is not None
    assert parse(content, job_uid=job_uid, attempt=attempt) is None


async def test_a_slow_response_times_out() -> None:
    async def respond(_: web.Request) -> web.Response:
        await asyncio.sleep(5)
        return status_response(progress={"step": 3})

    assert await fetch_progress(respond, timeout_seconds=0.1) is None


async def test_a_response_above_the_size_limit_is_truncated_and_ignored() -> None:
    async def respond(_: web.Request) -> web.Response:
        return web.Response(
            body=b'{"uid": "u", "attempt": 1, "progress": {"step": 3}, "x": "' + b"x" * MAX_RESPONSE_BYTES + b'"}'
        )

    assert await fetch_progress(respond) is None


async def test_redirects_are_not_followed() -> None:
    async def respond(request: web.Request) -> web.Response:
        if "again" in request.query:
            return status_response(progress={"step": 3})
        raise web.HTTPFound("/status?again=1")

    assert await fetch_progress(respond) is None


async def test_refused_connection_counts_as_no_response() -> None:
    async with aiohttp.ClientSession() as session:
        assert await fetch_status(session, "http://127.0.0.1:1/status", job_uid="u", attempt=1) is None


@pytest.mark.parametrize(
    ("pods", "host"),
    [
        pytest.param((), None, id="no pod"),
        pytest.param((pod(rank=1), pod(rank=0, address="10.0.0.2")), "10.0.0.2", id="rank 0 of two"),
        pytest.param((pod(attempt=0),), None, id="of an earlier attempt"),
        pytest.param((pod(phase="Pending"),), None, id="not running yet"),
        pytest.param((pod(address=""),), None, id="no address yet"),
        pytest.param((pod(address="fd00::2"),), "[fd00::2]", id="IPv6"),
    ],
)
def test_only_node_0_of_the_current_attempt_is_polled(pods: tuple[RawBody, ...], host: str | None) -> None:
    assert find_rank_zero_host(pods, job=JobOwner("a", "u"), attempt=1) == host


def on_host_network(body: RawBody, *, container: str = names.CONTAINER) -> RawBody:
    ports = [{"name": "master", "containerPort": 29500}, {"name": "status", "containerPort": 29501}]
    return {**body, "spec": {"hostNetwork": True, "containers": [{"name": container, "ports": ports}]}}


@pytest.mark.parametrize(
    ("pods", "port"),
    [
        pytest.param((pod(),), None, id="network of its own"),
        pytest.param((on_host_network(pod()),), 29501, id="host network"),
        pytest.param((on_host_network(pod(), container="proxy"),), None, id="no trainer container"),
        pytest.param((on_host_network(pod(attempt=0)), pod()), None, id="of an earlier attempt"),
        pytest.param((), None, id="no pod"),
    ],
)
def test_node_0_on_the_host_network_is_polled_on_its_own_port(pods: tuple[RawBody, ...], port: int | None) -> None:
    projected = tuple(map(project_pod, pods))

    assert find_rank_zero_port(pods, job=JobOwner("a", "u"), attempt=1) == port
    assert find_rank_zero_port(projected, job=JobOwner("a", "u"), attempt=1) == port


def add_silent_job(setup: "PollerUnderTest", uid: str) -> None:
    """Add a job whose pod did not respond to its last poll."""
    key, metadata = JobKey("default", uid), {"name": "a", "namespace": "default", "uid": uid, "resourceVersion": "1"}
    setup.jobs.store_if_newer({"metadata": metadata, "status": {"attempt": 1}})
    silent_pod = pod(address="localhost", uid=uid)
    silent_pod["metadata"]["labels"][names.JOB_UID] = uid
    silent_pod["metadata"]["ownerReferences"][0]["uid"] = uid
    setup.children.on_pod_event(None, silent_pod)
    setup.poller._failing_since[key] = (f"localhost:{setup.port}", 0.0)


class PollerUnderTest:
    """Progress poller with one job, whose only pod serves its status on this port."""

    def __init__(self, port: int, *, address: str = "127.0.0.1") -> None:
        self.port = port
        self.clock = 0.0
        self.advanced: list[JobKey] = []
        self.jobs = JobCache()
        metadata = {"name": "a", "namespace": "default", "uid": "u", "resourceVersion": "1"}
        self.jobs.store_if_newer({"metadata": metadata, "status": {"attempt": 1}})
        self.children = ChildCache(
            on_change=lambda _: None, current_attempt=self.jobs.current_attempt, is_current_pod=self.jobs.is_current_pod
        )
        self.children.on_pod_event(None, pod(address=address))
        self.poller = ProgressPoller(
            self.jobs, self.children, on_progress=self.advanced.append, port=port, clock=lambda: self.clock
        )

    async def poll(self) -> None:
        async with aiohttp.ClientSession() as session:
            await self.poller.poll_all(session)


async def test_job_is_enqueued_only_if_its_progress_changed() -> None:
    steps = iter((1, 1, 2))

    async def respond(_: web.Request) -> web.Response:
        return status_response(progress={"step": next(steps)})

    async with run_status_server(respond) as port:
        setup = PollerUnderTest(port)
        for expected in (1, 1, 2):
            await setup.poll()
            assert len(setup.advanced) == expected
    latest = setup.poller.get_latest_progress(KEY)
    assert latest is not None
    assert latest.step == 2


async def test_job_is_enqueued_if_its_degradations_changed() -> None:
    reports: Iterator[list[dict[str, str]]] = iter(([], [{"reason": "IdleGpus", "message": "2 of 4"}]))

    async def respond(_: web.Request) -> web.Response:
        return status_response(progress={"step": 1}, degraded=next(reports))

    async with run_status_server(respond) as port:
        setup = PollerUnderTest(port)
        await setup.poll()
        await setup.poll()

    assert len(setup.advanced) == 2
    assert setup.poller.get_degradations(KEY) == PolledDegradations(1, (Degradation("IdleGpus", "2 of 4"),))


async def test_degradations_of_a_command_without_progress_are_stored() -> None:
    reports: Iterator[list[dict[str, str]]] = iter(([], [{"reason": "RanksAlone"}], [{"reason": "RanksAlone"}], []))

    async def respond(_: web.Request) -> web.Response:
        return status_response(degraded=next(reports))

    async with run_status_server(respond) as port:
        setup = PollerUnderTest(port)
        for expected in (0, 1, 1, 2):
            await setup.poll()
            assert len(setup.advanced) == expected

    assert setup.poller.get_latest_progress(KEY) is None
    assert setup.poller.get_degradations(KEY) == PolledDegradations(1, ())


@pytest.mark.parametrize("address", LOOPBACK_ADDRESSES)
async def test_pod_is_polled_at_its_address_of_either_ip_family(address: str) -> None:
    async def respond(_: web.Request) -> web.Response:
        return status_response(progress={"step": 3})

    async with run_status_server(respond, address=address) as port:
        setup = PollerUnderTest(port, address=address)
        await setup.poll()

    latest = setup.poller.get_latest_progress(KEY)
    assert latest is not None
    assert latest.step == 3


async def test_single_missing_response_is_ignored() -> None:
    async def respond(_: web.Request) -> web.Response:
        return status_response(progress={"step": 1})

    async with run_status_server(respond) as port:
        setup = PollerUnderTest(port)
        await setup.poll()
    await setup.poll()  # fails, because the server has stopped
    latest = setup.poller.get_latest_progress(KEY)
    assert latest is not None
    assert (latest.step, len(setup.advanced)) == (1, 1)


async def test_unreachable_endpoint_is_reported_once_until_the_next_response() -> None:
    async def respond(_: web.Request) -> web.Response:
        return web.json_response({})  # a response clears the report even if it contains no progress

    async with run_status_server(respond) as port:
        setup = PollerUnderTest(port)
    reports = []
    for seconds in (0.0, UNREACHABLE_AFTER_SECONDS - 1, UNREACHABLE_AFTER_SECONDS, UNREACHABLE_AFTER_SECONDS + 10):
        setup.clock = seconds
        await setup.poll()
        reports.append((setup.poller.get_unreachable_endpoint(KEY), len(setup.advanced)))
    endpoint = f"127.0.0.1:{port}"
    assert reports == [("", 0), ("", 0), (endpoint, 1), (endpoint, 1)]

    async with run_status_server(respond) as port:
        setup.poller._port = port
        await setup.poll()
    assert (setup.poller.get_unreachable_endpoint(KEY), len(setup.advanced)) == ("", 2)


async def test_unreachable_time_of_a_new_pod_is_measured_from_its_first_poll() -> None:
    setup = PollerUnderTest(1)
    await setup.poll()
    setup.children.on_pod_event(pod(), pod(address="127.0.0.2"))
    setup.clock = UNREACHABLE_AFTER_SECONDS
    await setup.poll()
    assert (setup.poller.get_unreachable_endpoint(KEY), setup.advanced) == ("", [])
    setup.clock = 2 * UNREACHABLE_AFTER_SECONDS
    await setup.poll()
    assert setup.poller.get_unreachable_endpoint(KEY) == "127.0.0.2:1"
    setup.children.on_pod_event(pod(address="127.0.0.2"), None)
    await setup.poll()
    assert setup.poller.get_unreachable_endpoint(KEY) == ""


async def test_progress_of_a_job_deleted_during_the_poll_is_dropped() -> None:
    async def respond(_: web.Request) -> web.Response:
        setup.jobs.remove(KEY)
        return status_response(progress={"step": 1})

    async with run_status_server(respond) as port:
        setup = PollerUnderTest(port)
        await setup.poll()
    assert setup.poller.get_latest_progress(KEY) is None
    assert setup.advanced == []


async def test_pods_are_polled_at_fixed_intervals() -> None:
    polls = asyncio.Semaphore(0)

    async def respond(_: web.Request) -> web.Response:
        polls.release()
        return web.json_response({})

    async with run_status_server(respond) as port:
        task = asyncio.create_task(PollerUnderTest(port).poller.run(interval_seconds=0.01))
        async with asyncio.timeout(5):
            for _ in range(3):
                await polls.acquire()
        task.cancel()


async def test_pods_that_do_not_respond_do_not_delay_the_polls_of_other_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_poller, "POLL_TIMEOUT", aiohttp.ClientTimeout(total=5))
    monkeypatch.setattr(progress_poller, "MAX_CONCURRENT_POLLS", 3)
    polls = asyncio.Semaphore(0)
    silent_polls = 0

    async def respond(request: web.Request) -> web.Response:
        nonlocal silent_polls
        if request.host.startswith("localhost"):
            silent_polls += 1
            await asyncio.sleep(60)
        polls.release()
        return status_response(progress={"step": 1})

    async with run_status_server(respond) as port:
        setup = PollerUnderTest(port)
        for number in range(4):
            add_silent_job(setup, f"silent-{number}")
        task = asyncio.create_task(setup.poller.run(interval_seconds=0.01))
        async with asyncio.timeout(4):  # less than the timeout of one poll
            for _ in range(20):
                await polls.acquire()
        task.cancel()
    assert silent_polls == 2
