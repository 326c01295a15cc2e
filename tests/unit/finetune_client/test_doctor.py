"""Tests of the checks of a cluster, with scripted responses of the API server."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from finetune_client.async_client import AsyncClient
from finetune_client.doctor import PERMISSIONS, CheckOutcome, ClusterCheck
from finetune_client.errors import ClientError
from testing.fakes.http_api import build_status_response
from testing.fakes.job_api import JobApi, serve_jobs

NODES = "/api/v1/nodes"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/finetune-system/leases"
OPERATOR_PODS = "/api/v1/namespaces/finetune-system/pods"
CLAIMS = "/api/v1/namespaces/team/persistentvolumeclaims"
GROUP = "/apis/finetune.dev/v1alpha1"
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


def build_list(*items: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {}, "items": list(items)}


def build_claim(name: str, mode: str) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"accessModes": [mode]}, "status": {"phase": "Bound"}}


def build_lease(holder: str) -> dict[str, Any]:
    return {"metadata": {"name": "finetune-operator"}, "spec": {"holderIdentity": holder}}


def build_operator_pod(name: str, *, ready: str = "True", image: str = "trainer:1") -> dict[str, Any]:
    metadata = {"name": name, "labels": {"app.kubernetes.io/version": "0.1.0"}}
    env = [{"name": "FINETUNE_TRAINER_IMAGE", "value": image}]
    status = {"conditions": [{"type": "Ready", "status": ready}]}
    return {"metadata": metadata, "spec": {"containers": [{"env": env}]}, "status": status}


class ClusterApi(JobApi):
    """API server with one response per path; a number is the status of an error. `denied` lists denied resources."""

    def __init__(self) -> None:
        super().__init__()
        self.denied: set[str] = set()
        self.responses: dict[str, dict[str, Any] | int] = {
            "/version": {"gitVersion": "v1.37.2"},
            GROUP: {"resources": []},
            LEASES: build_list(build_lease("operator-a_b6e5"), build_lease("another-program_1")),
            OPERATOR_PODS: build_list(build_operator_pod("operator-a"), build_operator_pod("operator-b", image="x")),
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
    assert results["operator"].message == "finetune-system/operator-a 0.1.0 leads and is ready"
    assert results["devices"].message == "8 nvidia.com/gpu on 1 Kubernetes nodes"
    assert results["storage"].message == "models (Bound, ReadWriteMany)"


@pytest.mark.parametrize(
    ("path", "response", "title", "outcome", "message"),
    [
        (GROUP, 404, "custom resource", CheckOutcome.FAILED, "is not installed; install the Helm chart"),
        (
            LEASES,
            build_list(),
            "operator",
            CheckOutcome.FAILED,
            "found 2 pods of finetune-operator, none of which holds",
        ),
        (LEASES, build_list(build_lease("")), "operator", CheckOutcome.FAILED, "none of which holds a Lease"),
        (LEASES, 403, "operator", CheckOutcome.UNKNOWN, "no access (--operator-namespace names another one)"),
        (OPERATOR_PODS, 403, "operator", CheckOutcome.UNKNOWN, "pods of finetune-system: no access"),
        (
            OPERATOR_PODS,
            build_list(build_operator_pod("operator-a", ready="False")),
            "operator",
            CheckOutcome.FAILED,
            "finetune-system/operator-a 0.1.0 leads and is not ready; read its log",
        ),
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


async def test_the_operator_is_found_in_the_given_namespace_only(api: ClusterApi, tmp_path: Path) -> None:
    """Everybody may create objects with the names and labels of the operator in a namespace of his own."""
    name = "a" * 60 + "-7d9f8b6c5-x2x4z"  # longer than a hostname
    moved = {path: path.replace("finetune-system", "mine") for path in (LEASES, OPERATOR_PODS)}
    api.responses[moved[LEASES]] = build_list(build_lease(f"{name[:63]}_b6e5"))
    api.responses[moved[OPERATOR_PODS]] = build_list(build_operator_pod(name, image="mine:1"))

    async with AsyncClient(kubeconfig=str(tmp_path / "kubeconfig")) as client:
        images = [await client.read_default_image(**options) for options in ({}, {"operator_namespace": "mine"})]

    assert images == ["trainer:1", "mine:1"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({LEASES: 403}, "default is unknown: leases of finetune-system: no access .*; set spec.image"),
        ({OPERATOR_PODS: build_list()}, "found 0 pods of finetune-operator, none of which holds a Lease"),
        ({OPERATOR_PODS: build_list(build_operator_pod("operator-a", image=""))}, "default is none; set it"),
        ({LEASES: build_list(build_lease("operator-a_1"), build_lease("operator-b_1"))}, "default is trainer:1 or x"),
    ],
    ids=["no right", "no pod", "no default", "two operators"],
)
async def test_an_unknown_default_image_is_an_error(
    changes: dict[str, Any], message: str, api: ClusterApi, tmp_path: Path
) -> None:
    api.responses |= changes

    async with AsyncClient(kubeconfig=str(tmp_path / "kubeconfig")) as client:
        with pytest.raises(ClientError, match=rf"spec\.image: is not set, and the operator's .*{message}"):
            await client.read_default_image()


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
