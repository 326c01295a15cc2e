"""Tests of the checks of a cluster, with scripted responses of the API server."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from finetune_client.async_client import AsyncClient
from finetune_client.doctor import PERMISSIONS, CheckOutcome, ClusterCheck
from testing.fakes.http_api import build_status_response
from testing.fakes.job_api import JobApi, serve_jobs

DEPLOYMENTS, NODES = "/apis/apps/v1/deployments", "/api/v1/nodes"
CLAIMS = "/api/v1/namespaces/team/persistentvolumeclaims"
GROUP = "/apis/finetune.dev/v1alpha1"
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


def build_list(*items: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {}, "items": list(items)}


def build_claim(name: str, mode: str) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"accessModes": [mode]}, "status": {"phase": "Bound"}}


def build_deployment(*, ready: int) -> dict[str, Any]:
    labels = {"app.kubernetes.io/version": "0.1.0"}
    metadata = {"name": "finetune-operator", "namespace": "finetune-system", "labels": labels}
    return {"metadata": metadata, "spec": {"replicas": 2}, "status": {"readyReplicas": ready}}


class ClusterApi(JobApi):
    """API server with one response per path; a number is the status of an error. `denied` lists denied resources."""

    def __init__(self) -> None:
        super().__init__()
        self.denied: set[str] = set()
        self.responses: dict[str, dict[str, Any] | int] = {
            "/version": {"gitVersion": "v1.37.2"},
            GROUP: {"resources": []},
            DEPLOYMENTS: build_list(build_deployment(ready=2)),
            CLAIMS: build_list(build_claim("models", "ReadWriteMany")),
            NODES: build_list({"status": {"allocatable": {"cpu": "8", "nvidia.com/gpu": "8", "rdma/hca": "4"}}}),
        }

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Return the scripted response of a path, or the review of a right."""
        if request.path == REVIEWS:
            attributes = (await request.json())["spec"]["resourceAttributes"]
            resource = "/".join(filter(None, (attributes["resource"], attributes["subresource"])))
            return web.json_response({"status": {"allowed": resource not in self.denied}})
        response = self.responses[request.path]
        if isinstance(response, int):
            return build_status_response(response, "Reason", "no access" if response == 403 else "not found")
        return web.json_response(response)


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[ClusterApi]:
    async with serve_jobs(tmp_path, ClusterApi()) as api:
        yield api


async def examine(folder: Path) -> dict[str, ClusterCheck]:
    async with AsyncClient(kubeconfig=str(folder / "kubeconfig")) as client:
        return {result.title: result for result in await client.examine_cluster()}


async def test_every_check_of_a_complete_cluster_is_ok(api: ClusterApi, tmp_path: Path) -> None:
    results = await examine(tmp_path)

    assert {result.outcome for result in results.values()} == {CheckOutcome.OK}
    assert results["operator"].message == "finetune-system/finetune-operator 0.1.0, 2 of 2 replicas ready"
    assert results["devices"].message == "8 nvidia.com/gpu on 1 Kubernetes nodes"
    assert results["storage"].message == "models (Bound, ReadWriteMany)"


@pytest.mark.parametrize(
    ("path", "response", "title", "outcome", "message"),
    [
        (GROUP, 404, "custom resource", CheckOutcome.FAILED, "is not installed; install the Helm chart"),
        (DEPLOYMENTS, build_list(), "operator", CheckOutcome.FAILED, "no deployment of finetune-operator exists"),
        (DEPLOYMENTS, build_list(build_deployment(ready=0)), "operator", CheckOutcome.FAILED, "0 of 2 replicas"),
        (DEPLOYMENTS, 403, "operator", CheckOutcome.UNKNOWN, "deployments of all namespaces: no access"),
        (CLAIMS, build_list(), "storage", CheckOutcome.WARNING, "spec.output needs one"),
        (CLAIMS, build_list(build_claim("a", "ReadWriteOnce")), "storage", CheckOutcome.WARNING, "no claim is ReadW"),
        (NODES, build_list({"status": {"allocatable": {"cpu": "8"}}}), "devices", CheckOutcome.WARNING, "on CPUs"),
        (NODES, 403, "devices", CheckOutcome.UNKNOWN, "nodes: no access"),
    ],
)
async def test_what_is_missing_is_reported(
    path: str,
    response: dict[str, Any] | int,
    title: str,
    outcome: CheckOutcome,
    message: str,
    api: ClusterApi,
    tmp_path: Path,
) -> None:
    api.responses[path] = response

    result = (await examine(tmp_path))[title]

    assert result.outcome is outcome
    assert message in result.message


@pytest.mark.parametrize(
    ("denied", "outcome", "message"),
    [
        ("finetunejobs", CheckOutcome.FAILED, "missing: list finetunejobs (for list, status, why, wait); create"),
        ("pods/exec", CheckOutcome.WARNING, "missing: create pods/exec (for cp, report, logs --saved, exec)"),
    ],
)
async def test_missing_rights_are_listed_with_the_commands_that_need_them(
    denied: str, outcome: CheckOutcome, message: str, api: ClusterApi, tmp_path: Path
) -> None:
    api.denied = {denied}

    result = (await examine(tmp_path))["rights"]

    assert (result.outcome, result.message.startswith(message)) == (outcome, True)


def test_every_permission_names_the_commands_that_need_it() -> None:
    assert all(permission.commands for permission in PERMISSIONS)
