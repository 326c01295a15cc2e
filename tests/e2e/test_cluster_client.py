"""Tests of the Kubernetes client on a real API server, whose behaviour testing/fakes/http_api.py imitates."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
import pytest_asyncio

from finetune_api.v1alpha1.job import ObjectMeta
from finetune_operator import names
from finetune_operator.controller.events import build_event
from finetune_operator.core.actions import EmitEvent
from finetune_operator.kube.api_client import ApiClient, ApiError
from finetune_operator.kube.api_paths import ApiPath, build_path, collection_path, extend_path, object_path
from finetune_operator.kube.cluster import (
    ClusterError,
    Conflict,
    CreateRejected,
    KubernetesCluster,
    NameTaken,
    NotFound,
    ObjectRef,
)
from finetune_operator.kube.credentials import load_kubeconfig, open_session
from finetune_operator.kube.informer import Informer
from finetune_operator.manager.leader_election import LeaderElection, LeaseConfig
from finetune_operator.observation.ownership import JobOwner
from testing.processes.operator_stack import FORGER, OperatorInstallation

RawBody = dict[str, Any]
pytestmark = [pytest.mark.cluster, pytest.mark.versions]
NO_NODE = {"example.com/none": "there"}  # selector that matches no node, so that no kubelet changes the pod


@pytest_asyncio.fixture
async def api(deployment: OperatorInstallation) -> AsyncIterator[ApiClient]:
    """Return a client that the policy for children permits what it permits operators."""
    user = (("Impersonate-User", FORGER), ("Impersonate-Group", "system:masters"))
    access = replace(load_kubeconfig([deployment.provider.kubeconfig]), impersonation=user)
    async with open_session(access, connections=10) as session:
        yield ApiClient(access.server, request_session=session, watch_session=session)


@pytest_asyncio.fixture
async def namespace(api: ApiClient) -> AsyncIterator[str]:
    name = f"client-{uuid4().hex[:8]}"
    await api.call("POST", build_path("v1", "namespaces"), body={"kind": "Namespace", "metadata": {"name": name}})
    await wait_until(lambda: get_or_none(api, build_path("v1", "namespaces", name, "serviceaccounts", "default")))
    yield name
    await api.call("DELETE", build_path("v1", "namespaces", name))


async def get_or_none(api: ApiClient, path: ApiPath) -> RawBody | None:
    try:
        return await api.call("GET", path)
    except ApiError as error:
        if error.status == 404:
            return None
        raise


async def wait_until(probe: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(60):
        while not await probe():  # noqa: ASYNC110  an API server has no asyncio.Event
            await asyncio.sleep(0.05)


def build_job(namespace: str, **spec: Any) -> RawBody:
    """Build a suspended job, which an operator in the cluster does not start."""
    fields = {
        "model": {"name": "/data/model"},
        "dataset": {"train": [{"name": "/data/train.jsonl"}]},
        "sft": {},
        "output": {"persistentVolumeClaim": {"claimName": "models"}},
        "suspend": True,
        **spec,
    }
    metadata = {"name": "bert", "namespace": namespace, "labels": {"kept": "yes"}}
    return {"apiVersion": names.API_VERSION, "kind": "FineTuneJob", "metadata": metadata, "spec": fields}


def build_owner_reference(owner: RawBody) -> RawBody:
    metadata = owner["metadata"]
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
    }


def build_config_map(namespace: str, name: str, *, owner: RawBody | None = None) -> RawBody:
    metadata = {
        "name": name,
        "namespace": namespace,
        "ownerReferences": [build_owner_reference(owner)] if owner else [],
    }
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {}}


def build_pod(owner: RawBody, name: str = "bert-0-0", **spec: Any) -> RawBody:
    namespace, uid = owner["metadata"]["namespace"], owner["metadata"]["uid"]
    labels = {names.JOB_UID: uid, "test": namespace}
    metadata = {
        "name": name,
        "namespace": namespace,
        "labels": labels,
        "ownerReferences": [build_owner_reference(owner)],
    }
    containers = [{"name": "c", "image": "registry.example/none:1"}]
    fields = {"containers": containers, "nodeSelector": NO_NODE, "restartPolicy": "Never", **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": fields}


@pytest_asyncio.fixture
async def cluster(api: ApiClient) -> KubernetesCluster:
    return KubernetesCluster(api)


@pytest_asyncio.fixture
async def owner(api: ApiClient, namespace: str) -> RawBody:
    """Create a ConfigMap as owner of the pods, so that an operator in the cluster ignores them."""
    return await api.call("POST", collection_path("ConfigMap", namespace), body=build_config_map(namespace, "owner"))


@pytest_asyncio.fixture
async def bert_job(api: ApiClient, namespace: str) -> RawBody:
    return await api.call("POST", collection_path("FineTuneJob", namespace), body=build_job(namespace))


async def read_job(api: ApiClient, body: RawBody) -> RawBody:
    return await api.call("GET", object_path("FineTuneJob", body["metadata"]["namespace"], body["metadata"]["name"]))


async def write_status_with_retries(
    api: ApiClient, cluster: KubernetesCluster, body: RawBody, status: RawBody
) -> RawBody:
    """Write a status with retries, because an operator in the cluster may update the job concurrently."""
    for _ in range(5):
        try:
            return await cluster.write_status(await read_job(api, body), status)
        except Conflict:
            await asyncio.sleep(0.2)
    raise AssertionError("every attempt was a conflict")


async def test_status_write_changes_only_the_status(
    api: ApiClient, cluster: KubernetesCluster, bert_job: RawBody
) -> None:
    written = await write_status_with_retries(api, cluster, bert_job, {"phase": "Failed", "restarts": 2})
    assert written["status"]["restarts"] == 2
    assert written["spec"] == bert_job["spec"]
    assert written["metadata"]["labels"] == bert_job["metadata"]["labels"]
    assert written["metadata"]["generation"] == bert_job["metadata"]["generation"]


async def test_status_write_with_an_old_version_is_a_conflict(
    api: ApiClient, cluster: KubernetesCluster, bert_job: RawBody
) -> None:
    await write_status_with_retries(api, cluster, bert_job, {"phase": "Failed"})
    with pytest.raises(Conflict, match="modified"):
        await cluster.write_status(bert_job, {"phase": "Running"})


async def test_status_write_with_another_uid_is_a_conflict(
    api: ApiClient, cluster: KubernetesCluster, bert_job: RawBody, namespace: str
) -> None:
    newest = await read_job(api, bert_job)
    other_job = {**newest, "metadata": {**newest["metadata"], "uid": str(uuid4())}}
    with pytest.raises(Conflict):
        await cluster.write_status(other_job, {"phase": "Running"})


async def test_status_write_on_a_deleted_job_raises_not_found(
    cluster: KubernetesCluster, bert_job: RawBody, namespace: str
) -> None:
    await cluster.delete(ObjectRef("FineTuneJob", namespace, "bert", bert_job["metadata"]["uid"]))
    with pytest.raises(NotFound):
        await cluster.write_status(bert_job, {})


async def test_status_that_violates_the_schema_is_a_cluster_error(
    api: ApiClient, cluster: KubernetesCluster, bert_job: RawBody
) -> None:
    with pytest.raises(ClusterError, match=r"status\.restarts") as raised:
        await write_status_with_retries(api, cluster, bert_job, {"restarts": "many"})
    assert type(raised.value) is ClusterError


async def test_status_write_without_changes_keeps_the_resource_version(
    api: ApiClient, cluster: KubernetesCluster, bert_job: RawBody
) -> None:
    await write_status_with_retries(api, cluster, bert_job, {"phase": "Failed"})
    for _ in range(5):
        newest = await read_job(api, bert_job)
        with suppress(Conflict):  # an operator in the cluster may update the job concurrently
            rewritten = await cluster.write_status(newest, newest["status"])
            assert rewritten["metadata"]["resourceVersion"] == newest["metadata"]["resourceVersion"]
            return
    pytest.fail("every attempt was a conflict")


async def test_create_succeeds_if_the_object_already_exists_with_the_same_owner(
    cluster: KubernetesCluster, owner: RawBody
) -> None:
    await cluster.create(build_pod(owner))
    await cluster.create(build_pod(owner))
    assert len(await cluster.list_pods(owner["metadata"]["namespace"], names.JOB_UID, owner["metadata"]["uid"])) == 1


async def test_create_raises_name_taken_if_the_object_has_another_owner(
    cluster: KubernetesCluster, owner: RawBody, bert_job: RawBody
) -> None:
    await cluster.create(build_pod(owner))
    with pytest.raises(NameTaken):
        await cluster.create(build_pod(bert_job))


async def test_terminating_pod_occupies_its_name(cluster: KubernetesCluster, owner: RawBody) -> None:
    """A pod on a missing node stays Terminating until its grace period ends."""
    namespace, uid = owner["metadata"]["namespace"], owner["metadata"]["uid"]
    await cluster.create(build_pod(owner, nodeName="no-such-node", nodeSelector={}))
    [existing] = await cluster.list_pods(namespace, names.JOB_UID, uid)
    target = ObjectRef("Pod", namespace, "bert-0-0", existing["metadata"]["uid"])
    await cluster.delete(target, grace_seconds=300)
    [existing] = await cluster.list_pods(namespace, names.JOB_UID, uid)
    assert existing["metadata"]["deletionGracePeriodSeconds"] == 300
    with pytest.raises(ClusterError, match="still being deleted"):
        await cluster.create(build_pod(owner))
    await cluster.delete(target, grace_seconds=10)
    [existing] = await cluster.list_pods(namespace, names.JOB_UID, uid)
    assert existing["metadata"]["deletionGracePeriodSeconds"] == 10, "a later delete can shorten the grace period"
    await cluster.delete(target, grace_seconds=0)
    assert await cluster.list_pods(namespace, names.JOB_UID, uid) == ()
    await cluster.create(build_pod(owner))


async def test_invalid_pod_is_rejected(cluster: KubernetesCluster, owner: RawBody) -> None:
    with pytest.raises(CreateRejected, match="restartPolicy") as raised:
        await cluster.create(build_pod(owner, restartPolicy="Sometimes"))
    assert (raised.value.status, raised.value.kind, raised.value.name) == (422, "Pod", "bert-0-0")


async def test_pod_that_violates_pod_security_is_rejected(
    api: ApiClient, cluster: KubernetesCluster, owner: RawBody
) -> None:
    namespace = owner["metadata"]["namespace"]
    body = await api.call("GET", build_path("v1", "namespaces", namespace))
    body["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] = "restricted"
    await api.call("PUT", build_path("v1", "namespaces", namespace), body=body)
    with pytest.raises(CreateRejected, match="violates PodSecurity") as raised:
        await cluster.create(build_pod(owner, hostNetwork=True))
    assert raised.value.status == 403


async def test_pod_that_exceeds_the_quota_is_rejected(
    api: ApiClient, cluster: KubernetesCluster, owner: RawBody
) -> None:
    namespace = owner["metadata"]["namespace"]
    quota = {"kind": "ResourceQuota", "metadata": {"name": "few"}, "spec": {"hard": {"pods": "0"}}}
    path = build_path("v1", "namespaces", namespace, "resourcequotas")
    await api.call("POST", path, body=quota)

    async def is_quota_computed() -> object:
        return (await api.call("GET", extend_path(path, "few"))).get("status", {}).get("hard")

    await wait_until(is_quota_computed)
    with pytest.raises(CreateRejected, match="exceeded quota: few") as raised:
        await cluster.create(build_pod(owner))
    assert raised.value.status == 403


async def test_create_in_a_missing_namespace_raises_plain_cluster_error(
    cluster: KubernetesCluster, owner: RawBody
) -> None:
    body = build_pod(owner)
    body["metadata"]["namespace"] = "no-such-namespace"
    with pytest.raises(ClusterError, match="not found") as raised:
        await cluster.create(body)
    assert type(raised.value) is ClusterError


async def test_delete_ignores_an_object_with_another_uid(cluster: KubernetesCluster, owner: RawBody) -> None:
    namespace, uid = owner["metadata"]["namespace"], owner["metadata"]["uid"]
    await cluster.create(build_pod(owner))
    await cluster.delete(ObjectRef("Pod", namespace, "bert-0-0", str(uuid4())), grace_seconds=0)
    [existing] = await cluster.list_pods(namespace, names.JOB_UID, uid)
    await cluster.delete(ObjectRef("Pod", namespace, "bert-0-0", existing["metadata"]["uid"]), grace_seconds=0)
    assert await cluster.list_pods(namespace, names.JOB_UID, uid) == ()
    await cluster.delete(ObjectRef("Pod", namespace, "bert-0-0", existing["metadata"]["uid"]))


async def test_delete_without_a_uid_deletes_only_objects_of_the_job(
    api: ApiClient, cluster: KubernetesCluster, bert_job: RawBody, owner: RawBody, namespace: str
) -> None:
    await cluster.create(build_config_map(namespace, "bert-0", owner=bert_job))
    await cluster.create(build_config_map(namespace, "users", owner=owner))
    for name in ("bert-0", "users", "nowhere"):
        await cluster.delete(
            ObjectRef("ConfigMap", namespace, name, "", owner=JobOwner("bert", bert_job["metadata"]["uid"]))
        )
    assert await get_or_none(api, object_path("ConfigMap", namespace, "bert-0")) is None
    assert await get_or_none(api, object_path("ConfigMap", namespace, "users")) is not None


async def test_deleted_job_disappears_and_its_children_are_garbage_collected(
    api: ApiClient, cluster: KubernetesCluster, bert_job: RawBody, namespace: str
) -> None:
    await cluster.create(build_config_map(namespace, "bert-0", owner=bert_job))
    await cluster.delete(ObjectRef("FineTuneJob", namespace, "bert", bert_job["metadata"]["uid"]))
    assert await get_or_none(api, object_path("FineTuneJob", namespace, "bert")) is None

    async def is_child_deleted() -> bool:
        return await get_or_none(api, object_path("ConfigMap", namespace, "bert-0")) is None

    await wait_until(is_child_deleted)


async def test_get_returns_a_claim_or_none(api: ApiClient, cluster: KubernetesCluster, namespace: str) -> None:
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}, "storageClassName": ""}
    body = {"kind": "PersistentVolumeClaim", "metadata": {"name": "models"}, "spec": spec}
    await api.call("POST", collection_path("PersistentVolumeClaim", namespace), body=body)
    claim = await cluster.get("PersistentVolumeClaim", namespace, "models")
    assert claim is not None
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert await cluster.get("PersistentVolumeClaim", namespace, "datasets") is None


async def test_event_emitted_twice_is_stored_once(
    api: ApiClient, cluster: KubernetesCluster, bert_job: RawBody, caplog: pytest.LogCaptureFixture
) -> None:
    namespace, uid = bert_job["metadata"]["namespace"], bert_job["metadata"]["uid"]
    metadata = ObjectMeta(name="bert", namespace=namespace, uid=uid)
    event = build_event(metadata, EmitEvent("Normal", "Tested", "語" * 2000, "tested-0"), datetime.now(UTC))
    with caplog.at_level(logging.WARNING):
        await cluster.emit_event(event)
        await cluster.emit_event(event)
    assert caplog.records == []
    events = await api.call("GET", collection_path("Event", namespace))
    stored_events = [item for item in events["items"] if item["metadata"]["name"] == event["metadata"]["name"]]
    assert [(item["reason"], item["action"]) for item in stored_events] == [("Tested", "Tested")]


async def test_informer_reports_changes_in_order_and_relists_after_expiry(
    api: ApiClient, cluster: KubernetesCluster, owner: RawBody
) -> None:
    namespace, uid = owner["metadata"]["namespace"], owner["metadata"]["uid"]
    changes: list[tuple[str, bool]] = []

    def record_change(old_body: RawBody | None, new_body: RawBody | None) -> None:
        body = new_body or old_body
        assert body is not None
        changes.append((body["metadata"]["name"], new_body is not None))

    async def wait_for_change(name: str, exists: bool) -> None:
        async with asyncio.timeout(20):
            while (name, exists) not in changes:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    await cluster.create(build_pod(owner, "listed"))
    informer = Informer(api, collection_path("Pod", namespace), selector=f"test={namespace}", on_change=record_change)
    running = asyncio.create_task(informer.run())
    await asyncio.wait_for(informer.synced.wait(), 20)
    await cluster.create(build_pod(owner, "watched"))
    await wait_for_change("watched", True)
    uids = {
        item["metadata"]["name"]: item["metadata"]["uid"]
        for item in await cluster.list_pods(namespace, names.JOB_UID, uid)
    }
    await cluster.delete(ObjectRef("Pod", namespace, "watched", uids["watched"]), grace_seconds=0)
    await wait_for_change("watched", False)
    running.cancel()
    await asyncio.wait((running,))

    await cluster.delete(ObjectRef("Pod", namespace, "listed", uids["listed"]), grace_seconds=0)
    await cluster.create(build_pod(owner, "later"))
    informer._version = "1"  # expired resourceVersion, as after a long disconnection
    running = asyncio.create_task(informer.run())
    await wait_for_change("later", True)
    assert ("listed", False) in changes
    running.cancel()
    distinct = [change for number, change in enumerate(changes) if change not in changes[:number]]
    assert distinct == [("listed", True), ("watched", True), ("watched", False), ("listed", False), ("later", True)]


async def test_lease_has_one_holder_at_a_time(api: ApiClient, namespace: str) -> None:
    one, two = (LeaderElection(api, LeaseConfig(namespace, "lease", identity)) for identity in ("one", "two"))
    await one.acquire()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(two.acquire(), 1)
    await one.release()
    await asyncio.wait_for(two.acquire(), 5)
    assert (one.is_leading, two.is_leading) == (False, True)
