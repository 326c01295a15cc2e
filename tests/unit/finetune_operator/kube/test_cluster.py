"""KubernetesCluster against an API server in memory: what each answer means, and what is tried again."""

import logging
from typing import Any

import pytest

from finetune_operator import names
from finetune_operator.kube.cluster import (
    Cluster,
    ClusterError,
    Conflict,
    KubernetesCluster,
    NameTaken,
    NotFound,
    ObjectRef,
    Refused,
)
from testing.fakes.api_client import connected
from testing.fakes.http_api import Fault, HttpApi

Raw = dict[str, Any]
JOB_UID = "11111111-1111-1111-1111-111111111111"


def pod(name: str = "a-0-0", *, owner: str = JOB_UID, **metadata: Any) -> Raw:
    owners = [{"apiVersion": names.API_VERSION, "kind": "FineTuneJob", "name": "a", "uid": owner, "controller": True}]
    labels = {names.JOB_UID: owner}
    body = {"name": name, "namespace": "default", "labels": labels, "ownerReferences": owners, **metadata}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": body, "spec": {}}


def job(api: HttpApi) -> Raw:
    return api.put("finetunejobs", {"metadata": {"name": "a", "uid": JOB_UID}, "spec": {"numNodes": 2}})


async def test_a_status_write_carries_the_version_that_was_seen() -> None:
    api = HttpApi()
    seen = job(api)
    async with connected(api) as server:
        written = await KubernetesCluster(server).write_status(seen, {"phase": "Running"})

    assert written["status"] == {"phase": "Running"}
    assert written["spec"] == {"numNodes": 2}
    [request] = api.asked("PUT", "finetunejobs")
    assert request.place.subresource == "status"
    assert request.body is not None
    assert request.body["metadata"]["resourceVersion"] == seen["metadata"]["resourceVersion"]


async def test_a_status_write_on_an_old_job_is_a_conflict_and_is_not_repeated() -> None:
    api = HttpApi()
    seen = job(api)
    api.put("finetunejobs", {**seen, "spec": {"numNodes": 3}})
    async with connected(api) as server:
        with pytest.raises(Conflict):
            await KubernetesCluster(server).write_status(seen, {"phase": "Running"})

    assert len(api.asked("PUT", "finetunejobs")) == 1


async def test_a_status_write_does_not_hit_a_job_made_again_under_the_name() -> None:
    api = HttpApi()
    seen = job(api)
    api.remove("finetunejobs", "a")
    api.put("finetunejobs", {"metadata": {"name": "a", "uid": "another"}, "spec": {"numNodes": 2}})
    async with connected(api) as server:
        with pytest.raises(Conflict):
            await KubernetesCluster(server).write_status(seen, {"phase": "Running"})

    assert "status" not in api.objects["finetunejobs", "default", "a"]


async def test_a_status_write_on_a_deleted_job_says_so() -> None:
    api = HttpApi()
    seen = job(api)
    api.remove("finetunejobs", "a")
    async with connected(api) as server:
        with pytest.raises(NotFound):
            await KubernetesCluster(server).write_status(seen, {})


@pytest.mark.parametrize("status", [500, 503, 422])
async def test_a_failed_status_write_is_left_to_the_next_pass(status: int) -> None:
    api = HttpApi()
    seen = job(api)
    api.faults.append(Fault("PUT", "finetunejobs", status, times=9))
    async with connected(api) as server:
        with pytest.raises(ClusterError) as raised:
            await KubernetesCluster(server).write_status(seen, {})

    assert type(raised.value) is ClusterError
    assert len(api.asked("PUT", "finetunejobs")) == 1


async def test_a_status_write_whose_answer_was_lost_is_never_written_twice() -> None:
    api = HttpApi()
    seen = job(api)
    api.faults.append(Fault("PUT", "finetunejobs", 0, after=True))
    async with connected(api) as server:
        with pytest.raises(ClusterError):  # a Conflict if aiohttp asked again, which it may: the version is a fence
            await KubernetesCluster(server).write_status(seen, {"phase": "Running"})

    written = api.objects["finetunejobs", "default", "a"]
    assert written["status"] == {"phase": "Running"}
    assert int(written["metadata"]["resourceVersion"]) == int(seen["metadata"]["resourceVersion"]) + 1


async def test_a_create_whose_answer_was_lost_is_asked_again_and_finds_its_own_object() -> None:
    api = HttpApi()
    api.faults.append(Fault("POST", "pods", 0, after=True))
    async with connected(api) as server:
        await KubernetesCluster(server).create(pod())

    assert len(api.asked("POST", "pods")) == 2
    assert ("pods", "default", "a-0-0") in api.objects


async def test_an_object_of_the_same_owner_is_as_good_as_created() -> None:
    api = HttpApi()
    api.put("pods", pod())
    async with connected(api) as server:
        await KubernetesCluster(server).create(pod())


@pytest.mark.parametrize(
    ("theirs", "leaving", "message"),
    [
        pytest.param({"name": "b"}, False, "Pod a-0-0 exists and is not this job's", id="another job"),
        pytest.param({"kind": "Job"}, False, "Pod a-0-0 exists and is not this job's", id="another kind"),
        pytest.param({"apiVersion": "batch/v1"}, False, "Pod a-0-0 exists and is not this job's", id="another group"),
        pytest.param(
            {"apiVersion": "finetune.dev/v0"}, True, "Pod a-0-0 of a deleted job of the same name", id="older"
        ),
        pytest.param({}, True, "Pod a-0-0 of a deleted job of the same name is still there", id="one of this name"),
    ],
)
async def test_an_object_of_somebody_else_takes_the_name_for_good_or_until_it_follows_its_owner(
    theirs: Raw, leaving: bool, message: str
) -> None:
    api = HttpApi()
    [owner] = pod(owner="another")["metadata"]["ownerReferences"]
    api.put("pods", pod(ownerReferences=[{**owner, **theirs}]))
    async with connected(api) as server:
        with pytest.raises(NameTaken, match=message) as raised:
            await KubernetesCluster(server).create(pod())

    assert (raised.value.kind, raised.value.name, raised.value.leaving) == ("Pod", "a-0-0", leaving)


async def test_an_object_without_owner_takes_the_name() -> None:
    api = HttpApi()
    api.put("pods", pod(ownerReferences=[]))
    async with connected(api) as server:
        with pytest.raises(NameTaken):
            await KubernetesCluster(server).create(pod())


async def test_an_object_that_is_being_deleted_has_to_be_waited_for() -> None:
    api = HttpApi()
    api.put("pods", pod(deletionTimestamp="2026-01-01T00:00:00Z"))
    async with connected(api) as server:
        with pytest.raises(ClusterError, match="still being deleted") as raised:
            await KubernetesCluster(server).create(pod())

    assert type(raised.value) is ClusterError


@pytest.mark.parametrize("labels", [{}, {names.JOB_UID: "another"}])
async def test_an_object_of_ours_that_no_watch_tells_of_is_deleted_to_be_made_again(labels: dict[str, str]) -> None:
    api = HttpApi()
    api.put("pods", pod(labels=labels))
    async with connected(api) as server:
        with pytest.raises(ClusterError, match="Pod a-0-0 had lost its labels"):
            await KubernetesCluster(server).create(pod())
        assert api.objects == {}
        await KubernetesCluster(server).create(pod())


@pytest.mark.parametrize("status", [400, 403, 413, 422])
async def test_a_refused_create_names_the_object_and_is_not_repeated(status: int) -> None:
    api = HttpApi()
    api.faults.append(Fault("POST", "pods", status))
    async with connected(api) as server:
        with pytest.raises(Refused, match="a scripted fault") as raised:
            await KubernetesCluster(server).create(pod())

    assert (raised.value.status, raised.value.kind, raised.value.name) == (status, "Pod", "a-0-0")
    assert len(api.asked("POST", "pods")) == 1


async def test_a_webhook_that_does_not_answer_refuses_and_an_api_server_in_trouble_does_not() -> None:
    webhook = 'Internal error occurred: failed calling webhook "policy.example.com": connection refused'
    for message, refused in ((webhook, True), ("etcdserver: leader changed", False)):
        api = HttpApi()
        api.faults.append(Fault("POST", "pods", 500, times=3, message=message))
        async with connected(api) as server:
            with pytest.raises(ClusterError, match=message) as raised:
                await KubernetesCluster(server).create(pod())
        assert isinstance(raised.value, Refused) is refused


async def test_two_creates_that_race_for_quota_are_no_refusal() -> None:
    api = HttpApi()
    api.faults.append(Fault("POST", "pods", 409))
    async with connected(api) as server:
        with pytest.raises(ClusterError) as raised:
            await KubernetesCluster(server).create(pod())

    assert type(raised.value) is ClusterError


async def test_an_overloaded_server_is_given_the_time_it_asks_for() -> None:
    api = HttpApi()
    api.faults.append(Fault("POST", "pods", 429, headers={"Retry-After": "1"}))
    async with connected(api) as server:
        await KubernetesCluster(server).create(pod())

    assert len(api.asked("POST", "pods")) == 2


async def test_a_long_retry_after_is_handed_to_the_queue() -> None:
    api = HttpApi()
    api.faults.append(Fault("POST", "pods", 429, headers={"Retry-After": "30"}))
    async with connected(api) as server:
        with pytest.raises(ClusterError) as raised:
            await KubernetesCluster(server).create(pod())

    assert raised.value.retry_after == 30
    assert len(api.asked("POST", "pods")) == 1


async def test_tries_come_to_an_end() -> None:
    api = HttpApi()
    api.faults.append(Fault("POST", "pods", 500, times=99))
    async with connected(api) as server:
        with pytest.raises(ClusterError):
            await KubernetesCluster(server).create(pod())

    assert len(api.asked("POST", "pods")) == 3


async def test_a_delete_names_the_uid_the_grace_and_nothing_else() -> None:
    api = HttpApi()
    uid = api.put("pods", pod())["metadata"]["uid"]
    async with connected(api) as server:
        await KubernetesCluster(server).delete(ObjectRef("Pod", "default", "a-0-0", uid), grace_seconds=10)

    assert api.objects == {}
    [request] = api.asked("DELETE", "pods")
    assert request.body == {
        "kind": "DeleteOptions",
        "apiVersion": "v1",
        "preconditions": {"uid": uid},
        "gracePeriodSeconds": 10,
    }


async def test_a_job_is_deleted_without_waiting_for_its_children() -> None:
    api = HttpApi()
    job(api)
    async with connected(api) as server:
        await KubernetesCluster(server).delete(ObjectRef("FineTuneJob", "default", "a", JOB_UID))

    [request] = api.asked("DELETE", "finetunejobs")
    assert request.body is not None
    assert request.body["propagationPolicy"] == "Background"


async def test_what_is_gone_or_replaced_needs_no_delete() -> None:
    api = HttpApi()
    replaced = api.put("pods", pod())["metadata"]["uid"]
    async with connected(api) as server:
        cluster = KubernetesCluster(server)
        await cluster.delete(ObjectRef("Pod", "default", "a-0-0", "an older uid"))
        await cluster.delete(ObjectRef("Pod", "default", "nowhere", "any"))

    assert api.objects["pods", "default", "a-0-0"]["metadata"]["uid"] == replaced


async def test_a_conflict_on_the_very_object_is_an_error() -> None:
    api = HttpApi()
    uid = api.put("pods", pod())["metadata"]["uid"]
    api.faults.append(Fault("DELETE", "pods", 409))
    async with connected(api) as server:
        with pytest.raises(ClusterError):
            await KubernetesCluster(server).delete(ObjectRef("Pod", "default", "a-0-0", uid))


@pytest.mark.parametrize(
    ("owners", "left"),
    [
        pytest.param([{"kind": "FineTuneJob", "uid": JOB_UID, "controller": True}], 0, id="a job's"),
        pytest.param([{"kind": "Deployment", "uid": "x", "controller": True}], 1, id="another controller's"),
        pytest.param([], 1, id="a user's"),
    ],
)
async def test_without_a_uid_only_a_jobs_object_is_deleted(owners: list[Raw], left: int) -> None:
    api = HttpApi()
    api.put("configmaps", {"metadata": {"name": "a-0", "ownerReferences": owners}})
    async with connected(api) as server:
        await KubernetesCluster(server).delete(ObjectRef("ConfigMap", "default", "a-0", ""))

    assert len(api.objects) == left
    assert all(request.body["preconditions"]["uid"] for request in api.asked("DELETE", "configmaps") if request.body)


async def test_pods_are_listed_in_pages_and_by_job() -> None:
    api = HttpApi()
    for number in range(1203):
        api.put("pods", pod(f"a-0-{number}"))
    api.put("pods", pod("other", owner="another"))
    api.put(
        "pods", {**pod("elsewhere"), "metadata": {**pod("elsewhere")["metadata"], "namespace": "two"}}, namespace="two"
    )
    async with connected(api) as server:
        found = await KubernetesCluster(server).list_pods("default", JOB_UID)

    assert len(found) == 1203
    requests = api.asked("GET", "pods")
    assert len(requests) == 3
    assert all("resourceVersion" not in request.params for request in requests), "a cache must not answer"


async def test_a_claim_is_found_or_not_there() -> None:
    api = HttpApi()
    api.put("persistentvolumeclaims", {"metadata": {"name": "out"}, "spec": {"accessModes": ["ReadWriteMany"]}})
    async with connected(api) as server:
        cluster = KubernetesCluster(server)
        found, absent = (
            await cluster.get("PersistentVolumeClaim", "default", "out"),
            await cluster.get("PersistentVolumeClaim", "default", "in"),
        )

    assert found is not None
    assert found["spec"]["accessModes"] == ["ReadWriteMany"]
    assert absent is None


async def test_a_claim_that_may_not_be_read_is_not_absent() -> None:
    api = HttpApi()
    api.faults.append(Fault("GET", "persistentvolumeclaims", 403))
    async with connected(api) as server:
        with pytest.raises(ClusterError):
            await KubernetesCluster(server).get("PersistentVolumeClaim", "default", "out")


async def test_an_event_is_said_once_and_never_raises(caplog: pytest.LogCaptureFixture) -> None:
    api = HttpApi()
    event = {"kind": "Event", "metadata": {"name": "a.1", "namespace": "default"}, "reason": "Started"}
    async with connected(api) as server:
        cluster = KubernetesCluster(server)
        await cluster.emit_event(event)
        with caplog.at_level(logging.WARNING):
            await cluster.emit_event(event)
            assert caplog.records == []
            api.faults.append(Fault("POST", "events", 403))
            await cluster.emit_event(event)

    assert [record.getMessage() for record in caplog.records] == ["event not written: a scripted fault"]


async def test_no_server_is_an_error_that_says_so() -> None:
    async with connected(HttpApi()) as server:
        server._server = "http://127.0.0.1:1"
        with pytest.raises(ClusterError, match="no answer from the API server"):
            await KubernetesCluster(server).get("PersistentVolumeClaim", "default", "out")


def test_the_client_is_a_cluster() -> None:
    cluster: type[Cluster] = KubernetesCluster
    assert cluster is KubernetesCluster
