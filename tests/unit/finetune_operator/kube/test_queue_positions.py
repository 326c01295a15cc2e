"""Tests of the positions in the queues of Kueue."""

import asyncio
from typing import Any, cast

import pytest

from finetune_operator.kube.api_client import ApiClient, ApiError
from finetune_operator.kube.queue_positions import (
    MAX_AGE_SECONDS,
    PAUSE_SECONDS,
    TIMEOUT_SECONDS,
    QueuePositions,
    parse_positions,
)
from testing.fakes.virtual_time import run_in_virtual_time

PATH = "/apis/visibility.kueue.x-k8s.io/v1beta2/namespaces/{}/localqueues/{}/pendingworkloads"
RESPONSE_SECONDS = 0.5


class VisibilityApi:
    """Responds after half a second with the number of its earlier requests as the position of Workload `w`."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.error: Exception | None = None
        self.response_seconds = RESPONSE_SECONDS

    async def call_once(self, method: str, path: str) -> dict[str, Any]:
        assert method == "GET"
        self.paths.append(path)
        position = len(self.paths) - 1
        await asyncio.sleep(self.response_seconds)
        if self.error is not None:
            raise self.error
        return {"items": [{"metadata": {"name": "w"}, "positionInLocalQueue": position}]}


def build_positions(api: VisibilityApi) -> QueuePositions:
    return QueuePositions(cast("ApiClient", api))


def test_passes_share_the_list_of_a_queue() -> None:
    api = VisibilityApi()

    async def run() -> None:
        positions = build_positions(api)
        concurrent = await asyncio.gather(*(positions.list("a", "gpus") for _ in range(3)))
        await asyncio.sleep(MAX_AGE_SECONDS - 0.1)
        assert [*concurrent, await positions.list("a", "gpus")] == [{"w": 0}] * 4
        await asyncio.sleep(0.2)
        assert await positions.list("a", "gpus") == {"w": 1}

    run_in_virtual_time(run())
    assert api.paths == [PATH.format("a", "gpus")] * 2


def test_queues_are_separate_and_are_forgotten() -> None:
    api = VisibilityApi()

    async def run() -> None:
        positions = build_positions(api)
        await asyncio.gather(positions.list("a", "gpus"), positions.list("b", "gpus"), positions.list("a", "other"))
        await asyncio.sleep(MAX_AGE_SECONDS + 0.1)
        await positions.list("c", "gpus")
        assert len(positions._queues) == 1

    run_in_virtual_time(run())
    expected = [("a", "gpus"), ("b", "gpus"), ("a", "other"), ("c", "gpus")]
    assert api.paths == [PATH.format(namespace, queue) for namespace, queue in expected]


@pytest.mark.parametrize(
    ("error", "requests"),
    [
        pytest.param(ApiError("not found", status=404), 2, id="no API or no queue"),
        pytest.param(ApiError("unable to handle the request", status=503), 1, id="unavailable"),
        pytest.param(ValueError("not JSON"), 1, id="unreadable"),
    ],
)
def test_positions_are_unknown_while_kueue_does_not_serve_them(error: Exception, requests: int) -> None:
    api = VisibilityApi()
    api.error = error

    async def run() -> None:
        positions = build_positions(api)
        for queue in ("gpus", "other"):
            assert await positions.list("a", queue) == {}
        assert len(api.paths) == requests
        api.error = None
        await asyncio.sleep(PAUSE_SECONDS)
        assert await positions.list("a", "gpus") == {"w": requests}

    run_in_virtual_time(run())


def test_api_that_does_not_respond_delays_passes_once() -> None:
    api = VisibilityApi()
    api.response_seconds = 3600.0

    async def run() -> None:
        positions, loop = build_positions(api), asyncio.get_running_loop()
        started_at = loop.time()
        assert await asyncio.gather(*(positions.list("a", "gpus") for _ in range(20))) == [{}] * 20
        for queue in ("b", "c", "d"):
            assert await positions.list("a", queue) == {}
        assert loop.time() - started_at == pytest.approx(TIMEOUT_SECONDS)

    run_in_virtual_time(run())


@pytest.mark.parametrize(
    ("items", "positions"),
    [
        ([{"metadata": {"name": "w"}, "positionInLocalQueue": 1}, {"metadata": {"name": "other"}}], {"w": 1}),
        ([{"metadata": {"name": "w"}, "positionInLocalQueue": -1}], {}),
        ([{"metadata": {"name": "w"}, "positionInLocalQueue": "x"}], {}),
        ([{"metadata": "x", "positionInLocalQueue": 1}, {"positionInLocalQueue": 1}], {}),
        (["x", None], {}),
        ("x", {}),
        (None, {}),
    ],
)
def test_entries_of_an_unknown_form_have_no_position(items: Any, positions: dict[str, int]) -> None:
    assert parse_positions({"items": items}) == positions
    assert parse_positions(items) == {}
