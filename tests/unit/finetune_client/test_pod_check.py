"""Tests of the check with pods, with scripted states and logs of the pods."""

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from finetune_client import pod_check
from finetune_client.async_client import AsyncClient
from finetune_client.doctor import CheckOutcome, ClusterCheck
from finetune_client.errors import ClientError
from finetune_client.pod_check_objects import build_check_objects
from testing.builders.job_files import job_body
from testing.builders.jobs import job
from testing.fakes.http_api import RawBody, ScriptedFault
from testing.fakes.job_api import NAMESPACE, JobApi, serve_jobs

RUNNING: RawBody = {"phase": "Running", "containerStatuses": [{"state": {"running": {}}}]}
SUCCEEDED: RawBody = {
    "phase": "Succeeded",
    "containerStatuses": [{"state": {"terminated": {"reason": "Completed", "exitCode": 0}}}],
}


def build_waiting(reason: str, message: str) -> RawBody:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"phase": "Pending", "containerStatuses": [{"state": state}]}


class CheckApi(JobApi):
    """API server that gives a new pod the scripted Kubernetes node, status and log, by the number of the pod."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = ["gpu-3", "gpu-7"]
        self.statuses = [SUCCEEDED, SUCCEEDED]
        self.results: list[Any] = [{}, {}]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Respond as the base class does, then change the state of a new pod as the kubelet would."""
        response = await super().handle(request)
        if request.method == "POST" and response.status == 201 and request.path.endswith("/pods"):
            pod = await request.json()
            name = pod["metadata"]["name"]
            number = int(name[-1])
            spec = {**pod["spec"], "nodeName": self.nodes[number]}
            stored = self.objects["pods", NAMESPACE, name]
            self.put("pods", {**stored, "spec": spec, "status": self.statuses[number]}, namespace=NAMESPACE)
            result = self.results[number]
            self.logs[name] = [result if isinstance(result, str) else json.dumps(result)]
        return response


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[CheckApi]:
    monkeypatch.setattr(pod_check, "NETWORK_SECONDS", 0.0)
    monkeypatch.setattr(pod_check, "POLL_SECONDS", 0.01)
    async with serve_jobs(tmp_path, CheckApi()) as api:
        yield api


async def check(folder: Path, *, timeout_seconds: float = 0.1, **fields: Any) -> dict[str, ClusterCheck]:
    async with AsyncClient(kubeconfig=str(folder / "kubeconfig")) as client:
        body = job_body(name="bert", **{"numNodes": 2, "image": "trainer:1", **fields})
        results = await client.check_pods(body, timeout_seconds=timeout_seconds)
    return {result.title: result for result in results}


async def test_every_check_of_two_healthy_pods_is_ok(api: CheckApi, tmp_path: Path) -> None:
    results = await check(tmp_path)

    assert {title: result.outcome for title, result in results.items()} == {
        "image": CheckOutcome.OK,
        "DNS": CheckOutcome.OK,
        "pod network": CheckOutcome.OK,
    }
    assert results["image"].message == "trainer:1 starts on gpu-3 and gpu-7"


async def test_all_objects_are_deleted_with_the_first_pod(api: CheckApi, tmp_path: Path) -> None:
    await check(tmp_path)

    created = [request.body for request in api.requests if request.method == "POST" and request.body]
    first, *others = (body["metadata"] for body in created)
    (deletion,) = [request for request in api.requests if request.method == "DELETE"]
    assert deletion.resource.name == first["name"]
    assert [body["kind"] for body in created] == ["Pod", "Service", "Pod"]
    assert {metadata["ownerReferences"][0]["name"] for metadata in others} == {first["name"]}


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (build_waiting("ImagePullBackOff", "not found"), "ImagePullBackOff: not found"),
        (build_waiting("ContainerCreating", ""), "ContainerCreating: no message"),
        (
            {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False", "message": "0/2 nodes"}]},
            "not scheduled: 0/2 nodes",
        ),
        (
            {
                "phase": "Failed",
                "containerStatuses": [{"state": {"terminated": {"reason": "StartError", "message": "no python3"}}}],
            },
            "StartError: no python3",
        ),
        ({"phase": "Failed", "reason": "Evicted", "message": "low on disk"}, "Evicted: low on disk"),
        ({}, "Pending"),
    ],
)
async def test_a_pod_that_does_not_start_is_explained(
    status: RawBody, message: str, api: CheckApi, tmp_path: Path
) -> None:
    api.statuses[1] = status

    results = await check(tmp_path)

    assert results["image"].outcome is CheckOutcome.FAILED
    assert "trainer:1 does not start: bert-check-" in results["image"].message
    assert results["image"].message.endswith(f"-1 on gpu-7: {message}")
    assert (results["DNS"].outcome, results["pod network"].outcome) == (CheckOutcome.UNKNOWN, CheckOutcome.UNKNOWN)
    assert not any(name.startswith("bert-check") and name.endswith("-0") for _, _, name in api.objects)


async def test_an_image_that_cannot_be_pulled_ends_the_check_before_the_timeout(api: CheckApi, tmp_path: Path) -> None:
    api.statuses = [build_waiting("ContainerCreating", ""), build_waiting("ErrImageNeverPull", "no such image")]

    results = await check(tmp_path, timeout_seconds=3600)

    assert results["image"].outcome is CheckOutcome.FAILED


async def test_a_port_that_is_blocked_in_one_direction_is_reported(api: CheckApi, tmp_path: Path) -> None:
    api.statuses, api.results = [RUNNING, RUNNING], [{"41872": "timed out"}, {}]

    result = (await check(tmp_path))["pod network"]

    assert result.outcome is CheckOutcome.FAILED
    assert result.message.startswith("gpu-3 does not reach gpu-7 on port 41872: timed out; allow all TCP ports")
    assert "gpu-7 does not reach" not in result.message


async def test_a_name_that_does_not_resolve_is_reported(api: CheckApi, tmp_path: Path) -> None:
    api.statuses, api.results[1] = [RUNNING, RUNNING], {"dns": "Name or service not known", "29500": ""}

    results = await check(tmp_path)

    assert results["DNS"].outcome is CheckOutcome.FAILED
    assert "-1 on gpu-7: Name or service not known" in results["DNS"].message
    assert results["pod network"].message == "not tested, because a name does not resolve"


async def test_pods_on_one_kubernetes_node_do_not_prove_its_network(api: CheckApi, tmp_path: Path) -> None:
    api.nodes = ["gpu-3", "gpu-3"]

    results = await check(tmp_path)

    assert results["image"].message == "trainer:1 starts on gpu-3"
    assert results["pod network"].outcome is CheckOutcome.WARNING


async def test_a_job_on_one_node_needs_one_pod_and_no_network(api: CheckApi, tmp_path: Path) -> None:
    results = await check(tmp_path, numNodes=1)

    assert list(results) == ["image"]
    assert len(api.find_requests("POST", "pods")) == 1


@pytest.mark.parametrize("line", ["PermissionError: port 80", "[]", "[" * 8000], ids=["text", "list", "nested"])
async def test_a_crashed_probe_is_an_error_with_its_last_line(line: str, api: CheckApi, tmp_path: Path) -> None:
    api.results[0] = line

    with pytest.raises(ClientError, match=re.escape(f"the check has ended with: {line[:500]}")):
        await check(tmp_path)

    assert api.find_requests("DELETE", "pods")


async def test_pods_are_deleted_if_another_object_is_rejected(api: CheckApi, tmp_path: Path) -> None:
    api.faults.append(ScriptedFault("POST", "services", 403, message="no access"))

    with pytest.raises(ClientError, match=r"service team/bert-check-\w+: no access"):
        await check(tmp_path)

    assert not [key for key in api.objects if key[0] == "pods"]


async def test_a_job_without_image_is_checked_with_the_default_of_the_leading_operator(
    api: CheckApi, tmp_path: Path
) -> None:
    """A pod in another namespace with the labels of the operator decides nothing."""
    for namespace, image in (("aaa-tenant", "evil.example/img:1"), ("finetune-system", "default:1")):
        env = [{"name": "FINETUNE_TRAINER_IMAGE", "value": image}]
        metadata = {"name": "operator-a", "labels": {"app.kubernetes.io/name": "finetune-operator"}}
        api.put("pods", {"metadata": metadata, "spec": {"containers": [{"env": env}]}}, namespace=namespace)
        lease = {"metadata": {"name": "finetune-operator"}, "spec": {"holderIdentity": "operator-a_1"}}
        api.put("leases", lease, namespace=namespace)

    assert (await check(tmp_path, image=None))["image"].message.startswith("default:1 starts on")


def test_pods_are_placed_like_those_of_the_job_but_not_managed_by_operator_or_queue() -> None:
    large_job = job(
        name="b" * 52,
        numNodes=8,
        nprocPerNode=None,
        resources={"limits": {"nvidia.com/gpu": 8}},
        imagePullSecrets=[{"name": "registry"}],
        network={"interface": "bond0"},
        podTemplate={
            "labels": {"team": "vision", "kueue.x-k8s.io/queue-name": "gpus"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "nodeSelector": {"gpu": "h100"},
            "hostNetwork": True,
            "schedulingGates": [{"name": "acme.example/approval"}],
            "resourceClaims": [{"name": "nics", "resourceClaimTemplateName": "nics"}],
            "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule"},
                {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"},
            ],
        },
    )

    service, *pods = build_check_objects(large_job, image="trainer:1", suffix="abc123")

    assert len(pods) == 2
    for pod in pods:
        (container,) = pod["spec"]["containers"]
        assert len(pod["metadata"]["name"]) <= 63
        assert pod["metadata"]["labels"]["team"] == "vision"
        assert set(pod["metadata"]["labels"]) == {"team", "finetune.dev/job-name", "app.kubernetes.io/component"}
        assert pod["metadata"]["labels"]["finetune.dev/job-name"] != large_job.metadata.name
        assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        assert pod["spec"]["nodeSelector"] == {"gpu": "h100"}
        assert pod["spec"]["imagePullSecrets"] == [{"name": "registry"}]
        assert pod["spec"]["tolerations"][0]["key"] == "nvidia.com/gpu"
        assert pod["spec"]["securityContext"]["runAsNonRoot"]
        assert not pod["spec"]["automountServiceAccountToken"]
        assert "nvidia.com/gpu" not in json.dumps(container)
        assert "volumeMounts" not in container
        assert pod["spec"]["hostNetwork"]
        assert not {"schedulingGates", "resourceClaims"} & pod["spec"].keys()
        assert [spread["topologyKey"] for spread in pod["spec"]["topologySpreadConstraints"]] == [
            "kubernetes.io/hostname"
        ]


def test_pods_of_a_check_belong_to_no_group() -> None:
    """They would wait for a PodGroup or for the other pods of their group."""
    for provider in ({"provider": "PodGroup"}, {"queueName": "gpus"}, {"provider": "Volcano"}):
        _, *pods = build_check_objects(job(scheduling=provider), image="trainer:1", suffix="abc123")

        for pod in pods:
            assert not {"schedulingGroup", "schedulerName"} & set(pod["spec"])
            assert set(pod["metadata"]["labels"]) == {"finetune.dev/job-name", "app.kubernetes.io/component"}
            assert pod["metadata"]["annotations"] == {}
