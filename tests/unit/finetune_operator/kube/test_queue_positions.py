"""Tests of the positions in the queues of Kueue."""

import asyncio
from typing import Any, cast

import pytest

from finetune_operator.kube.api_client import ApiClient, ApiError
from finetune_operator.kube.queue_positions import MAX_AGE_SECONDS, QueuePositions, parse_positions
from testing.fakes.virtual_time import run_in_virtual_time

PATH = "/apis/visibility.kueue.x-k8s.io/v1beta2/namespaces/{}/localqueues/{}/pendingworkloads"
RESPONSE_SECONDS = 0.5


class VisibilityApi:
    """Responds after half a second with the number of its earlier requests as the position of Workload `w`."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.error: ApiError | None = None

    async def call(self, method: str, path: str) -> dict[str, Any]:
        assert method == "GET"
        self.paths.append(path)
        position = len(self.paths) - 1
        await asyncio.sleep(RESPONSE_SECONDS)
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


def test_positions_are_unknown_if_kueue_does_not_serve_them() -> None:
    api = VisibilityApi()
    api.error = ApiError("the server is currently unable to handle the request", status=503)

    async def run() -> None:
        positions = build_positions(api)
        assert [await positions.list("a", "gpus"), await positions.list("a", "gpus")] == [{}, {}]

    run_in_virtual_time(run())
    assert len(api.paths) == 1


@pytest.mark.parametrize(
    ("items", "positions"),
    [
        ([{"metadata": {"name": "w"}, "positionInLocalQueue": 1}, {"metadata": {"name": "other"}}], {"w": 1}),
        ([{"metadata": {"name": "w"}, "positionInLocalQueue": -1}], {}),
        ([{"metadata": {"name": "w"}, "positionInLocalQueue": "x"}], {}),
        ([{"metadata": "x", "positionInLocalQueue": 1}, {"positionInLocalQueue": 1}], {}),
        (["x", None], {}),
        ("x", {}),
    ],
)
def test_entries_of_an_unknown_form_have_no_position(items: Any, positions: dict[str, int]) -> None:
    assert parse_positions({"items": items}) == positions
