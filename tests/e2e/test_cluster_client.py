"""What the client believes about Kubernetes, and testing/fakes/http_api.py with it, asked of a real API server."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any
from uuid import uuid4

import pytest
import pytest_asyncio

from finetune_operator import names
from finetune_operator.kube.api_client import ApiError, ApiServer
from finetune_operator.kube.cluster import (
    ClusterError,
    Conflict,
    KubernetesCluster,
    NameTaken,
    NotFound,
    ObjectRef,
    Refused,
    collection_path,
    object_path,
)
from finetune_operator.kube.credentials import load_kubeconfig, open_session
from finetune_operator.kube.informer import Informer
from finetune_operator.manager.leader_election import LeaderElection, LeaseName
from testing.processes.operator_stack import Stack

Raw = dict[str, Any]
pytestmark = pytest.mark.cluster
NOWHERE = {"example.com/none": "there"}  # no scheduler finds such a node, and no kubelet interferes


@pytest_asyncio.fixture
async def api(stack: Stack) -> AsyncIterator[ApiServer]:
    access = load_kubeconfig([stack.provider.kubeconfig])
    async with open_session(access, connections=10) as session:
        yield ApiServer(access.server, calls=session, streams=session)


@pytest_asyncio.fixture
async def namespace(api: ApiServer) -> AsyncIterator[str]:
    name = f"client-{uuid4().hex[:8]}"
    await api.call("POST", "/api/v1/namespaces", body={"kind": "Namespace", "metadata": {"name": name}})
    await until(lambda: get(api, f"/api/v1/namespaces/{name}/serviceaccounts/default"))
    yield name
    await api.call("DELETE", f"/api/v1/namespaces/{name}")


async def get(api: ApiServer, path: str) -> Raw | None:
    try:
        return await api.call("GET", path)
    except ApiError as error:
        if error.status == 404:
            return None
        raise


async def until(probe: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(60):
        while not await probe():  # noqa: ASYNC110  an API server has no asyncio.Event
            await asyncio.sleep(0.05)


def job(namespace: str, **spec: Any) -> Raw:
    """A job that an operator, where one runs, leaves alone: it never starts."""
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


def owned_by(owner: Raw) -> Raw:
    metadata = owner["metadata"]
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": metadata["name"],
        "uid": metadata["uid"],
        "controller": True,
    }


def config_map(namespace: str, name: str, *, owner: Raw | None = None) -> Raw:
    metadata = {"name": name, "namespace": namespace, "ownerReferences": [owned_by(owner)] if owner else []}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {}}


def pod(owner: Raw, name: str = "bert-0-0", **spec: Any) -> Raw:
    namespace, uid = owner["metadata"]["namespace"], owner["metadata"]["uid"]
    labels = {names.JOB_UID: uid, "test": namespace}
    metadata = {"name": name, "namespace": namespace, "labels": labels, "ownerReferences": [owned_by(owner)]}
    containers = [{"name": "c", "image": "registry.example/none:1"}]
    fields = {"containers": containers, "nodeSelector": NOWHERE, "restartPolicy": "Never", **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": fields}


@pytest_asyncio.fixture
async def cluster(api: ApiServer) -> KubernetesCluster:
    return KubernetesCluster(api)


@pytest_asyncio.fixture
async def owner(api: ApiServer, namespace: str) -> Raw:
    """What owns the pods here; not a job, so that no operator feels responsible."""
    return await api.call("POST", collection_path("ConfigMap", namespace), body=config_map(namespace, "owner"))


@pytest_asyncio.fixture
async def bert(api: ApiServer, namespace: str) -> Raw:
    return await api.call("POST", collection_path("FineTuneJob", namespace), body=job(namespace))


async def read_job(api: ApiServer, body: Raw) -> Raw:
    return await api.call("GET", object_path("FineTuneJob", body["metadata"]["namespace"], body["metadata"]["name"]))


async def write_newest(api: ApiServer, cluster: KubernetesCluster, body: Raw, status: Raw) -> Raw:
    """An operator that runs in the cluster writes its own status, now and then before us."""
    for _ in range(5):
        try:
            return await cluster.write_status(await read_job(api, body), status)
        except Conflict:
            await asyncio.sleep(0.2)
    raise AssertionError("always a conflict")


async def test_a_status_write_changes_the_status_alone(api: ApiServer, cluster: KubernetesCluster, bert: Raw) -> None:
    written = await write_newest(api, cluster, bert, {"phase": "Failed", "restarts": 2})
    assert written["status"]["restarts"] == 2
    assert written["spec"] == bert["spec"]
    assert written["metadata"]["labels"] == bert["metadata"]["labels"]
    assert written["metadata"]["generation"] == bert["metadata"]["generation"]


async def test_a_status_write_on_an_old_job_is_a_conflict(
    api: ApiServer, cluster: KubernetesCluster, bert: Raw
) -> None:
    await write_newest(api, cluster, bert, {"phase": "Failed"})
    with pytest.raises(Conflict, match="modified"):
        await cluster.write_status(bert, {"phase": "Running"})


async def test_a_status_write_on_a_successor_is_a_conflict(
    api: ApiServer, cluster: KubernetesCluster, bert: Raw, namespace: str
) -> None:
    newest = await read_job(api, bert)
    imposter = {**newest, "metadata": {**newest["metadata"], "uid": str(uuid4())}}
    with pytest.raises(Conflict):
        await cluster.write_status(imposter, {"phase": "Running"})


async def test_a_status_write_on_a_deleted_job_says_so(cluster: KubernetesCluster, bert: Raw, namespace: str) -> None:
    await cluster.delete(ObjectRef("FineTuneJob", namespace, "bert", bert["metadata"]["uid"]))
    with pytest.raises(NotFound):
        await cluster.write_status(bert, {})


async def test_a_status_that_the_schema_forbids_is_an_error(
    api: ApiServer, cluster: KubernetesCluster, bert: Raw
) -> None:
    with pytest.raises(ClusterError, match=r"status\.restarts") as raised:
        await write_newest(api, cluster, bert, {"restarts": "many"})
    assert type(raised.value) is ClusterError


async def test_a_status_write_that_changes_nothing_keeps_the_version(
    api: ApiServer, cluster: KubernetesCluster, bert: Raw
) -> None:
    await write_newest(api, cluster, bert, {"phase": "Failed"})
    for _ in range(5):
        newest = await read_job(api, bert)
        with suppress(Conflict):  # with an operator that runs in the cluster, too
            again = await cluster.write_status(newest, newest["status"])
            assert again["metadata"]["resourceVersion"] == newest["metadata"]["resourceVersion"]
            return
    pytest.fail("always a conflict")


async def test_an_object_of_ours_is_as_good_as_created(cluster: KubernetesCluster, owner: Raw) -> None:
    await cluster.create(pod(owner))
    await cluster.create(pod(owner))
    assert len(await cluster.list_pods(owner["metadata"]["namespace"], owner["metadata"]["uid"])) == 1


async def test_an_object_of_somebody_else_takes_the_name(cluster: KubernetesCluster, owner: Raw, bert: Raw) -> None:
    await cluster.create(pod(owner))
    with pytest.raises(NameTaken):
        await cluster.create(pod(bert))


async def test_a_pod_that_is_being_deleted_keeps_its_name(cluster: KubernetesCluster, owner: Raw) -> None:
    """A pod bound to a node that does not answer: deleted with grace, it stays."""
    namespace, uid = owner["metadata"]["namespace"], owner["metadata"]["uid"]
    await cluster.create(pod(owner, nodeName="no-such-node", nodeSelector={}))
    [there] = await cluster.list_pods(namespace, uid)
    target = ObjectRef("Pod", namespace, "bert-0-0", there["metadata"]["uid"])
    await cluster.delete(target, grace_seconds=300)
    [there] = await cluster.list_pods(namespace, uid)
    assert there["metadata"]["deletionGracePeriodSeconds"] == 300
    with pytest.raises(ClusterError, match="still being deleted"):
        await cluster.create(pod(owner))
    await cluster.delete(target, grace_seconds=10)
    [there] = await cluster.list_pods(namespace, uid)
    assert there["metadata"]["deletionGracePeriodSeconds"] == 10, "a later delete may shorten the grace"
    await cluster.delete(target, grace_seconds=0)
    assert await cluster.list_pods(namespace, uid) == ()
    await cluster.create(pod(owner))


async def test_an_invalid_pod_is_refused(cluster: KubernetesCluster, owner: Raw) -> None:
    with pytest.raises(Refused, match="restartPolicy") as raised:
        await cluster.create(pod(owner, restartPolicy="Sometimes"))
    assert (raised.value.status, raised.value.kind, raised.value.name) == (422, "Pod", "bert-0-0")


async def test_a_pod_that_pod_security_forbids_is_refused(
    api: ApiServer, cluster: KubernetesCluster, owner: Raw
) -> None:
    namespace = owner["metadata"]["namespace"]
    body = await api.call("GET", f"/api/v1/namespaces/{namespace}")
    body["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] = "restricted"
    await api.call("PUT", f"/api/v1/namespaces/{namespace}", body=body)
    with pytest.raises(Refused, match="violates PodSecurity") as raised:
        await cluster.create(pod(owner, hostNetwork=True))
    assert raised.value.status == 403


async def test_a_pod_beyond_the_quota_is_refused(api: ApiServer, cluster: KubernetesCluster, owner: Raw) -> None:
    namespace = owner["metadata"]["namespace"]
    quota = {"kind": "ResourceQuota", "metadata": {"name": "few"}, "spec": {"hard": {"pods": "0"}}}
    path = f"/api/v1/namespaces/{namespace}/resourcequotas"
    await api.call("POST", path, body=quota)

    async def counted() -> object:
        return (await api.call("GET", f"{path}/few")).get("status", {}).get("hard")

    await until(counted)
    with pytest.raises(Refused, match="exceeded quota: few") as raised:
        await cluster.create(pod(owner))
    assert raised.value.status == 403


async def test_a_namespace_that_is_not_there_is_tried_later(cluster: KubernetesCluster, owner: Raw) -> None:
    elsewhere = pod(owner)
    elsewhere["metadata"]["namespace"] = "no-such-namespace"
    with pytest.raises(ClusterError, match="not found") as raised:
        await cluster.create(elsewhere)
    assert type(raised.value) is ClusterError


async def test_a_delete_spares_what_has_another_uid(cluster: KubernetesCluster, owner: Raw) -> None:
    namespace, uid = owner["metadata"]["namespace"], owner["metadata"]["uid"]
    await cluster.create(pod(owner))
    await cluster.delete(ObjectRef("Pod", namespace, "bert-0-0", str(uuid4())), grace_seconds=0)
    [there] = await cluster.list_pods(namespace, uid)
    await cluster.delete(ObjectRef("Pod", namespace, "bert-0-0", there["metadata"]["uid"]), grace_seconds=0)
    assert await cluster.list_pods(namespace, uid) == ()
    await cluster.delete(ObjectRef("Pod", namespace, "bert-0-0", there["metadata"]["uid"]))


async def test_without_a_uid_only_a_jobs_object_is_deleted(
    api: ApiServer, cluster: KubernetesCluster, bert: Raw, owner: Raw, namespace: str
) -> None:
    await cluster.create(config_map(namespace, "bert-0", owner=bert))
    await cluster.create(config_map(namespace, "users", owner=owner))
    for name in ("bert-0", "users", "nowhere"):
        await cluster.delete(ObjectRef("ConfigMap", namespace, name, ""))
    assert await get(api, object_path("ConfigMap", namespace, "bert-0")) is None
    assert await get(api, object_path("ConfigMap", namespace, "users")) is not None


async def test_a_job_is_deleted_at_once_and_its_children_follow(
    api: ApiServer, cluster: KubernetesCluster, bert: Raw, namespace: str
) -> None:
    await cluster.create(config_map(namespace, "bert-0", owner=bert))
    await cluster.delete(ObjectRef("FineTuneJob", namespace, "bert", bert["metadata"]["uid"]))
    assert await get(api, object_path("FineTuneJob", namespace, "bert")) is None

    async def gone() -> bool:
        return await get(api, object_path("ConfigMap", namespace, "bert-0")) is None

    await until(gone)


async def test_a_claim_is_found_or_not_there(api: ApiServer, cluster: KubernetesCluster, namespace: str) -> None:
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}, "storageClassName": ""}
    body = {"kind": "PersistentVolumeClaim", "metadata": {"name": "models"}, "spec": spec}
    await api.call("POST", collection_path("PersistentVolumeClaim", namespace), body=body)
    found = await cluster.get("PersistentVolumeClaim", namespace, "models")
    assert found is not None
    assert found["spec"]["accessModes"] == ["ReadWriteMany"]
    assert await cluster.get("PersistentVolumeClaim", namespace, "datasets") is None


async def test_an_event_is_said_once(
    api: ApiServer, cluster: KubernetesCluster, bert: Raw, caplog: pytest.LogCaptureFixture
) -> None:
    namespace, uid = bert["metadata"]["namespace"], bert["metadata"]["uid"]
    about = {"apiVersion": names.API_VERSION, "kind": "FineTuneJob", "name": "bert", "namespace": namespace, "uid": uid}
    event = {"metadata": {"name": "bert.1", "namespace": namespace}, "involvedObject": about, "reason": "Tested"}
    with caplog.at_level(logging.WARNING):
        await cluster.emit_event(event)
        await cluster.emit_event(event)
    assert caplog.records == []
    listed = await api.call("GET", collection_path("Event", namespace))
    assert [item["reason"] for item in listed["items"] if item["metadata"]["name"] == "bert.1"] == ["Tested"]


async def test_the_informer_sees_every_change_in_order_and_heals_a_gap(
    api: ApiServer, cluster: KubernetesCluster, owner: Raw
) -> None:
    namespace, uid = owner["metadata"]["namespace"], owner["metadata"]["uid"]
    heard: list[tuple[str, bool]] = []

    def hear(before: Raw | None, after: Raw | None) -> None:
        body = after or before
        assert body is not None
        heard.append((body["metadata"]["name"], after is not None))

    async def told(name: str, there: bool) -> None:
        async with asyncio.timeout(20):
            while (name, there) not in heard:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    await cluster.create(pod(owner, "listed"))
    informer = Informer(api, collection_path("Pod", namespace), selector=f"test={namespace}", on_change=hear)
    running = asyncio.create_task(informer.run())
    await asyncio.wait_for(informer.synced.wait(), 20)
    await cluster.create(pod(owner, "watched"))
    await told("watched", True)
    there = {item["metadata"]["name"]: item["metadata"]["uid"] for item in await cluster.list_pods(namespace, uid)}
    await cluster.delete(ObjectRef("Pod", namespace, "watched", there["watched"]), grace_seconds=0)
    await told("watched", False)
    running.cancel()
    await asyncio.wait((running,))

    await cluster.delete(ObjectRef("Pod", namespace, "listed", there["listed"]), grace_seconds=0)
    await cluster.create(pod(owner, "later"))
    informer._version = "1"  # as after a long absence
    running = asyncio.create_task(informer.run())
    await told("later", True)
    assert ("listed", False) in heard
    running.cancel()
    changes = [change for number, change in enumerate(heard) if change not in heard[:number]]
    assert changes == [("listed", True), ("watched", True), ("watched", False), ("listed", False), ("later", True)]


async def test_the_lease_has_one_holder(api: ApiServer, namespace: str) -> None:
    one, two = (LeaderElection(api, LeaseName(namespace, "lease", identity)) for identity in ("one", "two"))
    await one.acquire()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(two.acquire(), 1)
    await one.release()
    await asyncio.wait_for(two.acquire(), 5)
    assert (one.leading, two.leading) == (False, True)
