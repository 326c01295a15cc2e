"""Tests of KubernetesCluster against an in-memory API server."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from finetune_operator import names
from finetune_operator.kube.cluster import (
    Cluster,
    ClusterError,
    Conflict,
    CreateRejected,
    KubernetesCluster,
    NameTaken,
    NotFound,
    ObjectRef,
)
from finetune_operator.observation.ownership import JobOwner, RawBody
from testing.fakes.api_client import serve_and_connect
from testing.fakes.http_api import HttpApi, ScriptedFault

JOB_UID = "11111111-1111-1111-1111-111111111111"


OWNER = {"apiVersion": names.API_VERSION, "kind": "FineTuneJob", "name": "a", "uid": JOB_UID, "controller": True}


def pod(name: str = "a-0-0", *, owner: str = JOB_UID, **metadata: Any) -> RawBody:
    owners = [{**OWNER, "uid": owner}]
    labels = {names.JOB_UID: owner}
    body = {"name": name, "namespace": "default", "labels": labels, "ownerReferences": owners, **metadata}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": body, "spec": {}}


@pytest.fixture
async def cluster(api: HttpApi) -> AsyncIterator[KubernetesCluster]:
    """Return a cluster that is connected to the API server."""
    async with serve_and_connect(api) as server:
        yield KubernetesCluster(server)


def get_stored_job(api: HttpApi) -> RawBody:
    return api.put("finetunejobs", {"metadata": {"name": "a", "uid": JOB_UID}, "spec": {"numNodes": 2}})


async def test_a_status_write_contains_the_resource_version_of_the_job(
    api: HttpApi, cluster: KubernetesCluster
) -> None:
    body = get_stored_job(api)
    written = await cluster.write_status(body, {"phase": "Running"})

    assert written["status"] == {"phase": "Running"}
    assert written["spec"] == {"numNodes": 2}
    [request] = api.find_requests("PUT", "finetunejobs")
    assert request.resource.subresource == "status"
    assert request.body is not None
    assert request.body["metadata"]["resourceVersion"] == body["metadata"]["resourceVersion"]


@pytest.mark.parametrize(
    ("stored", "error"),
    [
        pytest.param({"uid": JOB_UID}, Conflict, id="newer version of the job"),
        pytest.param({"uid": "another"}, Conflict, id="new job with the same name"),
        pytest.param(None, NotFound, id="deleted job"),
    ],
)
async def test_a_status_write_to_another_version_of_the_job_changes_nothing_and_is_not_retried(
    api: HttpApi, cluster: KubernetesCluster, stored: RawBody | None, error: type[ClusterError]
) -> None:
    body = get_stored_job(api)
    if stored is None or stored["uid"] != JOB_UID:
        api.remove("finetunejobs", "a")
    if stored is not None:
        api.put("finetunejobs", {"metadata": {"name": "a", **stored}, "spec": {"numNodes": 3}})
    with pytest.raises(error):
        await cluster.write_status(body, {"phase": "Running"})

    assert len(api.find_requests("PUT", "finetunejobs")) == 1
    assert not any("status" in stored_body for stored_body in api.objects.values())


@pytest.mark.parametrize("status", [500, 503, 422])
async def test_a_failed_status_write_is_not_retried_by_the_client(
    api: HttpApi, cluster: KubernetesCluster, status: int
) -> None:
    body = get_stored_job(api)
    api.faults.append(ScriptedFault("PUT", "finetunejobs", status, times=9))
    with pytest.raises(ClusterError) as raised:
        await cluster.write_status(body, {})

    assert type(raised.value) is ClusterError
    assert len(api.find_requests("PUT", "finetunejobs")) == 1


async def test_status_write_with_a_lost_response_takes_effect_once(api: HttpApi, cluster: KubernetesCluster) -> None:
    body = get_stored_job(api)
    api.faults.append(ScriptedFault("PUT", "finetunejobs", 0, after_execution=True))
    with pytest.raises(ClusterError):  # a second request by aiohttp would raise Conflict
        await cluster.write_status(body, {"phase": "Running"})

    written = api.objects["finetunejobs", "default", "a"]
    assert written["status"] == {"phase": "Running"}
    assert int(written["metadata"]["resourceVersion"]) == int(body["metadata"]["resourceVersion"]) + 1


async def test_create_with_a_lost_response_is_retried_and_finds_its_own_object(
    api: HttpApi, cluster: KubernetesCluster
) -> None:
    api.faults.append(ScriptedFault("POST", "pods", 0, after_execution=True))
    await cluster.create(pod())

    assert len(api.find_requests("POST", "pods")) == 2
    assert ("pods", "default", "a-0-0") in api.objects


UNRELATED = "Pod a-0-0 exists and is not this job's"
PREDECESSOR = "Pod a-0-0 of a deleted job of the same name is still there"


@pytest.mark.parametrize(
    ("owners", "message"),
    [
        pytest.param([{**OWNER, "uid": "x", "name": "b"}], UNRELATED, id="another job"),
        pytest.param([{**OWNER, "uid": "x", "kind": "Job"}], UNRELATED, id="another kind"),
        pytest.param([{**OWNER, "uid": "x", "apiVersion": "batch/v1"}], UNRELATED, id="another group"),
        pytest.param([], UNRELATED, id="no owner"),
        pytest.param([{**OWNER, "uid": "x", "apiVersion": "finetune.dev/v0"}], PREDECESSOR, id="older API version"),
        pytest.param([{**OWNER, "uid": "x"}], PREDECESSOR, id="job of the same name"),
    ],
)
async def test_name_taken_error_distinguishes_unrelated_objects_from_those_of_a_predecessor(
    api: HttpApi, cluster: KubernetesCluster, owners: list[RawBody], message: str
) -> None:
    api.put("pods", pod(ownerReferences=owners))
    with pytest.raises(NameTaken, match=message) as raised:
        await cluster.create(pod())

    assert (raised.value.kind, raised.value.name) == ("Pod", "a-0-0")
    assert raised.value.predecessor_terminating is (message == PREDECESSOR)


@pytest.mark.parametrize("is_deleting", [True, False], ids=["the existing object is being deleted", "quota conflict"])
async def test_a_create_that_may_succeed_later_is_not_rejected(
    api: HttpApi, cluster: KubernetesCluster, is_deleting: bool
) -> None:
    if is_deleting:
        api.put("pods", pod(deletionTimestamp="2026-01-01T00:00:00Z"))
    else:
        api.faults.append(ScriptedFault("POST", "pods", 409))
    with pytest.raises(ClusterError, match="still being deleted" if is_deleting else "a scripted fault") as raised:
        await cluster.create(pod())

    assert type(raised.value) is ClusterError


@pytest.mark.parametrize("field", ["data", "binaryData"])
async def test_config_map_with_the_jobs_owner_reference_and_other_content_is_replaced(
    api: HttpApi, cluster: KubernetesCluster, field: str
) -> None:
    """Whoever may create ConfigMaps can write any owner reference; the supervisor would run what it contains."""
    manifest = {**pod(), "kind": "ConfigMap", "data": {"job.json": "{}"}, "binaryData": {"supervisor.pyz": "UEs="}}
    api.put("configmaps", {**manifest, field: {"job.json": '{"command": "sh"}'}})
    with pytest.raises(ClusterError, match="had other content than this attempt needs"):
        await cluster.create(manifest)
    assert api.objects == {}
    await cluster.create(manifest)
    await cluster.create(manifest)


@pytest.mark.parametrize("labels", [{}, {names.JOB_UID: "another"}])
async def test_own_object_without_the_job_label_is_recreated(
    api: HttpApi, cluster: KubernetesCluster, labels: dict[str, str]
) -> None:
    api.put("pods", pod(labels=labels))
    with pytest.raises(ClusterError, match="Pod a-0-0 had lost its labels"):
        await cluster.create(pod())
    assert api.objects == {}
    await cluster.create(pod())


@pytest.mark.parametrize("status", [400, 403, 413, 422])
async def test_error_of_a_rejected_create_contains_the_object_name_and_is_not_retried(
    api: HttpApi, cluster: KubernetesCluster, status: int
) -> None:
    api.faults.append(ScriptedFault("POST", "pods", status))
    with pytest.raises(CreateRejected, match="a scripted fault") as raised:
        await cluster.create(pod())

    assert (raised.value.status, raised.value.kind, raised.value.name) == (status, "Pod", "a-0-0")
    assert len(api.find_requests("POST", "pods")) == 1


WEBHOOK = 'Internal error occurred: failed calling webhook "policy.example.com": connection refused'


@pytest.mark.parametrize(
    ("message", "is_rejected"), [(WEBHOOK, True), ("etcdserver: leader changed", False)], ids=["webhook", "etcd"]
)
async def test_failing_webhook_rejects_the_create_but_an_internal_server_error_does_not(
    api: HttpApi, cluster: KubernetesCluster, message: str, is_rejected: bool
) -> None:
    api.faults.append(ScriptedFault("POST", "pods", 500, times=3, message=message))
    with pytest.raises(ClusterError, match=message) as raised:
        await cluster.create(pod())

    assert isinstance(raised.value, CreateRejected) is is_rejected


async def test_dry_run_has_a_generated_name_and_reports_a_failing_webhook_as_a_rejection(
    api: HttpApi, cluster: KubernetesCluster
) -> None:
    """Another pod may have the name, which would fail every pass."""
    api.faults.append(ScriptedFault("POST", "pods", 500, times=3, message=WEBHOOK))
    with pytest.raises(CreateRejected, match="connection refused") as raised:
        await cluster.dry_run_create(pod())

    request = api.find_requests("POST", "pods")[0]
    assert request.body is not None
    metadata = request.body["metadata"]
    assert (request.params, metadata["generateName"], "name" in metadata) == ({"dryRun": "All"}, "a-0-0-", False)
    assert raised.value.name == "a-0-0"


async def test_a_short_retry_after_is_respected(api: HttpApi, cluster: KubernetesCluster) -> None:
    api.faults.append(ScriptedFault("POST", "pods", 429, headers={"Retry-After": "1"}))
    await cluster.create(pod())

    assert len(api.find_requests("POST", "pods")) == 2


@pytest.mark.parametrize(
    ("status", "headers", "retry_after", "requests"),
    [
        pytest.param(429, {"Retry-After": "30"}, 30, 1, id="long Retry-After"),
        pytest.param(500, {}, None, 3, id="without Retry-After"),
    ],
)
async def test_number_of_retries_is_limited_and_the_error_contains_retry_after(
    api: HttpApi, cluster: KubernetesCluster, status: int, headers: RawBody, retry_after: int | None, requests: int
) -> None:
    api.faults.append(ScriptedFault("POST", "pods", status, headers=headers, times=99))
    with pytest.raises(ClusterError) as raised:
        await cluster.create(pod())

    assert raised.value.retry_after == retry_after
    assert len(api.find_requests("POST", "pods")) == requests


async def test_a_delete_contains_the_uid_and_the_grace_period(api: HttpApi, cluster: KubernetesCluster) -> None:
    uid = api.put("pods", pod())["metadata"]["uid"]
    await cluster.delete(ObjectRef("Pod", "default", "a-0-0", uid), grace_seconds=10)

    assert api.objects == {}
    [request] = api.find_requests("DELETE", "pods")
    assert request.body == {
        "kind": "DeleteOptions",
        "apiVersion": "v1",
        "preconditions": {"uid": uid},
        "gracePeriodSeconds": 10,
    }


async def test_a_job_is_deleted_without_waiting_for_its_children(api: HttpApi, cluster: KubernetesCluster) -> None:
    get_stored_job(api)
    await cluster.delete(ObjectRef("FineTuneJob", "default", "a", JOB_UID))

    [request] = api.find_requests("DELETE", "finetunejobs")
    assert request.body is not None
    assert request.body["propagationPolicy"] == "Background"


async def test_delete_of_a_missing_or_replaced_object_does_nothing(api: HttpApi, cluster: KubernetesCluster) -> None:
    new_uid = api.put("pods", pod())["metadata"]["uid"]
    await cluster.delete(ObjectRef("Pod", "default", "a-0-0", "an older uid"))
    await cluster.delete(ObjectRef("Pod", "default", "missing", "any"))

    assert api.objects["pods", "default", "a-0-0"]["metadata"]["uid"] == new_uid


async def test_delete_raises_an_error_on_a_conflict_with_the_same_object(
    api: HttpApi, cluster: KubernetesCluster
) -> None:
    uid = api.put("pods", pod())["metadata"]["uid"]
    api.faults.append(ScriptedFault("DELETE", "pods", 409))
    with pytest.raises(ClusterError):
        await cluster.delete(ObjectRef("Pod", "default", "a-0-0", uid))


@pytest.mark.parametrize(
    ("owner_references", "remaining_count"),
    [
        pytest.param([OWNER], 0, id="controlled by the job"),
        pytest.param([{**OWNER, "uid": "next"}], 1, id="controlled by its successor"),
        pytest.param([{**OWNER, "name": "b"}], 1, id="with the uid of the job and another name"),
        pytest.param([{**OWNER, "apiVersion": "v1"}], 1, id="with the uid of the job and another group"),
        pytest.param([{**OWNER, "kind": "Deployment"}], 1, id="with the uid of the job and another kind"),
        pytest.param([{**OWNER, "controller": False}], 1, id="owned, but not controlled"),
        pytest.param([], 1, id="without a controller"),
    ],
)
async def test_delete_without_uid_deletes_only_objects_controlled_by_the_job(
    api: HttpApi, cluster: KubernetesCluster, owner_references: list[RawBody], remaining_count: int
) -> None:
    api.put("configmaps", {"metadata": {"name": "a-0", "ownerReferences": owner_references}})
    await cluster.delete(ObjectRef("ConfigMap", "default", "a-0", "", owner=JobOwner("a", JOB_UID)))

    assert len(api.objects) == remaining_count
    assert all(
        request.body["preconditions"]["uid"] for request in api.find_requests("DELETE", "configmaps") if request.body
    )


async def test_the_pods_of_a_job_are_listed_in_pages(api: HttpApi, cluster: KubernetesCluster) -> None:
    for number in range(1203):
        api.put("pods", pod(f"a-0-{number}"))
    api.put("pods", pod("other", owner="another"))
    api.put(
        "pods", {**pod("elsewhere"), "metadata": {**pod("elsewhere")["metadata"], "namespace": "two"}}, namespace="two"
    )
    listed = await cluster.list_pods("default", names.JOB_UID, JOB_UID)

    assert len(listed) == 1203
    requests = api.find_requests("GET", "pods")
    assert len(requests) == 3
    assert all("resourceVersion" not in request.params for request in requests), (
        "the list must not be served from a cache"
    )


async def test_get_returns_none_for_a_missing_claim(api: HttpApi, cluster: KubernetesCluster) -> None:
    api.put("persistentvolumeclaims", {"metadata": {"name": "out"}, "spec": {"accessModes": ["ReadWriteMany"]}})
    existing, absent = (
        await cluster.get("PersistentVolumeClaim", "default", "out"),
        await cluster.get("PersistentVolumeClaim", "default", "in"),
    )

    assert existing is not None
    assert existing["spec"]["accessModes"] == ["ReadWriteMany"]
    assert absent is None


async def test_get_raises_an_error_for_a_forbidden_claim(api: HttpApi, cluster: KubernetesCluster) -> None:
    api.faults.append(ScriptedFault("GET", "persistentvolumeclaims", 403))
    with pytest.raises(ClusterError):
        await cluster.get("PersistentVolumeClaim", "default", "out")


async def test_a_duplicate_event_is_ignored_and_a_failed_one_is_logged(
    api: HttpApi, cluster: KubernetesCluster, caplog: pytest.LogCaptureFixture
) -> None:
    event = {"kind": "Event", "metadata": {"name": "a.1", "namespace": "default"}, "reason": "Started"}
    await cluster.emit_event(event)
    with caplog.at_level(logging.WARNING):
        await cluster.emit_event(event)
        assert caplog.records == []
        api.faults.append(ScriptedFault("POST", "events", 403))
        await cluster.emit_event(event)

    assert [record.getMessage() for record in caplog.records] == ["event not written: a scripted fault"]


async def test_an_unreachable_api_server_is_a_cluster_error() -> None:
    async with serve_and_connect(HttpApi()) as server:
        server._server = "http://127.0.0.1:1"
        with pytest.raises(ClusterError, match="no answer from the API server"):
            await KubernetesCluster(server).get("PersistentVolumeClaim", "default", "out")


async def test_concurrent_lists_of_the_pods_of_several_jobs_share_requests(
    api: HttpApi, cluster: KubernetesCluster
) -> None:
    owners = [f"uid-{number}" for number in range(3)]
    for number, owner in enumerate(owners):
        for rank in range(number):  # the first job has no pod
            api.put("pods", pod(f"job-{number}-0-{rank}", owner=owner))
    lists = await asyncio.gather(*(cluster.list_pods("default", names.JOB_UID, owner) for owner in owners))

    names_by_job = [sorted(body["metadata"]["name"] for body in pods) for pods in lists]
    assert names_by_job == [[], ["job-1-0-0"], ["job-2-0-0", "job-2-0-1"]]
    assert len(api.find_requests("GET", "pods")) == 1


async def test_deletion_of_a_created_config_map_needs_no_read(api: HttpApi, cluster: KubernetesCluster) -> None:
    target = ObjectRef("ConfigMap", "default", "a-0", "", owner=JobOwner("a", JOB_UID))
    await cluster.create({**pod("a-0"), "kind": "ConfigMap"})
    await cluster.delete(target)
    await cluster.delete(target)  # of an object that this process no longer knows

    assert not api.objects
    assert [request.method for request in api.find_requests("GET", "configmaps")] == ["GET"]


@pytest.mark.parametrize(
    ("owner_uid", "is_replaced"), [("another", False), (JOB_UID, True)], ids=["another job", "replaced by a user"]
)
async def test_config_map_that_is_not_of_the_job_is_not_deleted(
    api: HttpApi, cluster: KubernetesCluster, owner_uid: str, is_replaced: bool
) -> None:
    await cluster.create({**pod("a-0"), "kind": "ConfigMap"})
    if is_replaced:
        api.remove("configmaps", "a-0")
        api.put("configmaps", {**pod("a-0", owner="another"), "kind": "ConfigMap"})
    await cluster.delete(ObjectRef("ConfigMap", "default", "a-0", "", owner=JobOwner("a", owner_uid)))

    assert ("configmaps", "default", "a-0") in api.objects


def test_kubernetes_cluster_implements_the_cluster_protocol() -> None:
    cluster: type[Cluster] = KubernetesCluster
    assert cluster is KubernetesCluster
