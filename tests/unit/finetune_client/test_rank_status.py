"""Tests of reading the status of ranks through the API server."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from finetune_api.v1alpha1.status import JobStatus, Phase
from finetune_client.async_client import AsyncClient
from finetune_client.rank_status import RankStatus
from testing.fakes.http_api import HttpApi, build_status_response, serve_api
from testing.fakes.job_api import JobApi, serve_jobs


class RankApi(JobApi):
    """API server that proxies requests to the status port of pods; `bodies` contains their responses."""

    bodies: dict[str, str]
    port: str = ""  # of the last request
    redirect: str = ""  # address to which a pod redirects

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Serve the status of a pod, or any other resource as the base class does."""
        if not request.path.endswith((":8080/proxy/status", ":29501/proxy/status")):
            return await super().handle(request)
        pod, _, self.port = request.path.split("/")[-3].partition(":")
        if self.redirect:
            return web.Response(status=302, headers={"Location": self.redirect})
        if pod not in self.bodies:
            return build_status_response(503, "ServiceUnavailable", "no route to host")
        return web.Response(text=self.bodies[pod])


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[RankApi]:
    async with serve_jobs(tmp_path, RankApi()) as api:
        yield api


@pytest.fixture
async def client(api: RankApi, tmp_path: Path) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(kubeconfig=str(tmp_path / "kubeconfig")) as client:
        yield client


def build_report(uid: str, **fields: Any) -> str:
    rank = {"rank": 2, "phase": "training", "step": 7, "heartbeatAgeSeconds": 1.5, "peakMemoryBytes": 2**30, "new": 1}
    return json.dumps({"uid": uid, "attempt": 1, "ranks": [rank], **fields})


async def test_ranks_of_all_nodes_are_read_and_unreachable_nodes_reported(client: AsyncClient, api: RankApi) -> None:
    uid = api.put_job(JobStatus(phase=Phase.RUNNING, attempt=1), numNodes=2)["metadata"]["uid"]
    api.bodies = {"bert-1-1": build_report(uid)}

    first, second = await client.list_ranks("bert")

    assert first.problem == "pod team/bert-1-0: no route to host"
    assert second.ranks == (
        RankStatus(rank=2, phase="training", step=7, heartbeatAgeSeconds=1.5, peakMemoryBytes=2**30),
    )


async def test_a_pod_cannot_redirect_the_request_and_its_token_to_another_server(
    client: AsyncClient, api: RankApi
) -> None:
    api.put_job(JobStatus(phase=Phase.RUNNING, attempt=1), numNodes=1)
    other = HttpApi()
    async with serve_api(other) as api.redirect:
        (node,) = await client.list_ranks("bert")

    assert node.problem == "pod team/bert-1-0: the answer is a redirect, which is not followed (HTTP 302)"
    assert other.requests == []


@pytest.mark.parametrize(("host_network", "port"), [(False, "8080"), (True, "29501")])
async def test_ranks_on_the_host_network_are_read_from_their_own_port(
    client: AsyncClient, api: RankApi, host_network: bool, port: str
) -> None:
    template = {"hostNetwork": host_network}
    uid = api.put_job(JobStatus(phase=Phase.RUNNING, attempt=1), numNodes=1, podTemplate=template)["metadata"]["uid"]
    api.bodies = {"bert-1-0": build_report(uid)}

    (node,) = await client.list_ranks("bert")

    assert (node.problem, api.port) == ("", port)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (build_report("of another job"), "its answer is that of another job or attempt"),
        ("[" * 100_000, "its answer is not a status report"),
        ('{"uid": 3}', "its answer is not a status report"),
        ("x" * 1_000_000, "its answer is not a status report"),
        ("", "its answer is not a status report"),
    ],
    ids=["another job", "deeply nested", "wrong types", "too long", "empty"],
)
async def test_a_response_that_is_no_report_of_this_job_is_reported(
    body: str, problem: str, client: AsyncClient, api: RankApi
) -> None:
    api.put_job(JobStatus(phase=Phase.RUNNING, attempt=1), numNodes=1)
    api.bodies = {"bert-1-0": body}

    (node,) = await client.list_ranks("bert")

    assert (node.ranks, node.problem) == ((), f"pod bert-1-0: {problem}")
