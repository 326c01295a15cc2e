"""Conformance checks, which send the same requests to the simulated and to a real API server."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from finetune_operator import names
from finetune_operator.kube.api_client import ApiClient, ApiError
from finetune_operator.kube.api_paths import ApiPath, collection_path, extend_path, object_path
from finetune_operator.observation.ownership import parse_time
from testing.builders.jobs import spec

RawBody = dict[str, Any]
Facts = dict[str, Any]
LABEL = "contract"


@dataclass(frozen=True)
class ClusterUnderTest:
    """A simulated or real API server, with builders of pods whose behaviour is known."""

    api: ApiClient
    namespace: str
    build_long_running_pod: Callable[[str], RawBody]  # the pod ignores SIGTERM until its grace period ends
    build_short_lived_pod: Callable[[str], RawBody]  # the pod soon exits with code 1
    build_unschedulable_pod: Callable[[str], RawBody]  # the pod fits on no Kubernetes node

    def get_object_path(self, kind: str, name: str) -> ApiPath:
        """Return the URL path of an object."""
        return object_path(kind, self.namespace, name)

    async def request(self, method: str, path: ApiPath, body: RawBody | None = None) -> str:
        """Send a request and return `ok`, or the status code and reason of the error."""
        try:
            await self.api.call_once(method, path, body=body)
        except ApiError as error:
            return f"{error.status} {error.reason}"
        return "ok"

    async def create(self, manifest: RawBody) -> str:
        """Create an object with POST."""
        return await self.request("POST", collection_path(manifest["kind"], self.namespace), manifest)

    async def read(self, kind: str, name: str) -> RawBody:
        """Read an object with GET."""
        return await self.api.call_once("GET", self.get_object_path(kind, name))

    async def wait_until(self, probe: Callable[[], Awaitable[bool]]) -> None:
        """Poll until the probe returns True, for at most one minute."""
        async with asyncio.timeout(60):
            while not await probe():  # noqa: ASYNC110  an API server has no asyncio.Event
                await asyncio.sleep(0.05)

    async def wait_for_phase(self, name: str, *, phase: str) -> RawBody:
        """Wait until the pod has this phase, and return the pod."""

        async def has_phase() -> bool:
            return bool((await self.read("Pod", name))["status"].get("phase") == phase)

        await self.wait_until(has_phase)
        return await self.read("Pod", name)

    async def wait_until_removed(self, name: str) -> None:
        """Wait until the pod object no longer exists."""

        async def is_removed() -> bool:
            return await self.request("GET", self.get_object_path("Pod", name)) == "404 NotFound"

        await self.wait_until(is_removed)


def build_config_map(name: str, **labels: str) -> RawBody:
    """Return a ConfigMap that no controller changes."""
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "labels": {LABEL: name, **labels}}}


def build_suspended_job(name: str) -> RawBody:
    """Return a suspended job, which never starts."""
    metadata = {"name": name, "labels": {LABEL: name}}
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.FINETUNEJOB_KIND,
        "metadata": metadata,
        "spec": spec(suspend=True),
    }


async def check_name_conflicts_and_uids(cluster: ClusterUnderTest) -> Facts:
    """Check creates with an existing name, deletes with a uid precondition, and reads of a deleted object."""
    name = "names"
    facts: Facts = {"create": await cluster.create(set_namespace(cluster, build_config_map(name)))}
    facts["create again"] = await cluster.create(set_namespace(cluster, build_config_map(name)))
    other_uid: RawBody = {"preconditions": {"uid": "00000000-0000-0000-0000-000000000000"}}
    facts["delete another uid"] = await cluster.request("DELETE", cluster.get_object_path("ConfigMap", name), other_uid)
    uid = (await cluster.read("ConfigMap", name))["metadata"]["uid"]
    same_uid = {"preconditions": {"uid": uid}}
    facts["delete this uid"] = await cluster.request("DELETE", cluster.get_object_path("ConfigMap", name), same_uid)
    facts["delete a deleted object"] = await cluster.request(
        "DELETE", cluster.get_object_path("ConfigMap", name), same_uid
    )
    facts["read a deleted object"] = await cluster.request("GET", cluster.get_object_path("ConfigMap", name))
    facts["create again after the deletion"] = await cluster.create(set_namespace(cluster, build_config_map(name)))
    facts["a new uid"] = (await cluster.read("ConfigMap", name))["metadata"]["uid"] != uid
    facts["delete the new object with the old uid"] = await cluster.request(
        "DELETE", cluster.get_object_path("ConfigMap", name), same_uid
    )
    return facts


async def check_lists(cluster: ClusterUnderTest) -> Facts:
    """Check lists with a label selector; their resourceVersion is at least that of the newest object."""
    for name in ("list-a", "list-b"):
        await cluster.create(
            set_namespace(cluster, build_config_map(name, shape="round" if name == "list-a" else "flat"))
        )
    newest = await cluster.read("ConfigMap", "list-b")
    pages = [
        page
        async for page in cluster.api.list_pages(collection_path("ConfigMap", cluster.namespace), selector="shape=flat")
    ]
    return {
        "selected": [item["metadata"]["name"] for page in pages for item in page["items"]],
        "kind": pages[0]["kind"],
        "has the newest version": int(pages[0]["metadata"]["resourceVersion"])
        >= int(newest["metadata"]["resourceVersion"]),
    }


async def check_status_updates(cluster: ClusterUnderTest) -> Facts:
    """Check that status writes with an outdated resourceVersion or uid are rejected (optimistic locking)."""
    name = "locked"
    facts: Facts = {"create": await cluster.create(set_namespace(cluster, build_suspended_job(name)))}
    path = cluster.get_object_path(names.FINETUNEJOB_KIND, name)
    written_job = await _write_status(cluster, path)
    facts["the spec is unchanged"] = (await cluster.read(names.FINETUNEJOB_KIND, name))["spec"] == written_job["spec"]
    facts["generation"] = written_job["metadata"]["generation"]
    facts["an equal status keeps the version"] = await _is_version_unchanged_by_rewrite(cluster, path)
    stale = {**written_job, "metadata": {**written_job["metadata"], "resourceVersion": "1"}, "status": {"restarts": 7}}
    facts["write the status on an old version"] = await cluster.request("PUT", extend_path(path, "status"), stale)
    other = {**written_job, "metadata": {**written_job["metadata"], "uid": "other"}, "status": {"restarts": 8}}
    del other["metadata"]["resourceVersion"]
    facts["write the status of another uid"] = await cluster.request("PUT", extend_path(path, "status"), other)
    facts["delete in the background"] = await cluster.request("DELETE", path, {"propagationPolicy": "Background"})
    facts["read right after the deletion"] = await cluster.request("GET", path)
    facts["write the status of a deleted job"] = await cluster.request("PUT", extend_path(path, "status"), written_job)
    return facts


async def check_graceful_deletion(cluster: ClusterUnderTest) -> Facts:
    """Check that later delete requests only shorten the grace period of a running pod, whose name remains in use."""
    name = "terminating"
    facts: Facts = {"create": await cluster.create(set_namespace(cluster, cluster.build_long_running_pod(name)))}
    await cluster.wait_for_phase(name, phase="Running")
    path = cluster.get_object_path("Pod", name)
    deadlines: list[datetime] = []
    for seconds in (20, 40, 8):
        facts[f"delete within {seconds} s"] = await cluster.request("DELETE", path, {"gracePeriodSeconds": seconds})
        metadata = (await cluster.read("Pod", name))["metadata"]
        facts[f"grace period after the request of {seconds} s"] = metadata["deletionGracePeriodSeconds"]
        deadline = parse_time(metadata["deletionTimestamp"])
        assert deadline is not None
        deadlines.append(deadline)
    facts["seconds by which the deadline moves"] = [(deadline - deadlines[0]).total_seconds() for deadline in deadlines]
    facts["create the same name during the grace period"] = await cluster.create(
        set_namespace(cluster, cluster.build_long_running_pod(name))
    )
    facts["phase during the grace period"] = (await cluster.read("Pod", name))["status"]["phase"]
    await cluster.wait_until_removed(name)
    facts["create the same name after the removal"] = await cluster.create(
        set_namespace(cluster, cluster.build_long_running_pod(name))
    )
    facts["force-delete"] = await cluster.request("DELETE", path, {"gracePeriodSeconds": 0})
    facts["read right after the deletion"] = await cluster.request("GET", path)
    return facts


async def check_deletion_without_kubelet(cluster: ClusterUnderTest) -> Facts:
    """Check that unscheduled and terminated pods are removed without a grace period."""
    facts: Facts = {}
    await cluster.create(set_namespace(cluster, cluster.build_unschedulable_pod("unscheduled")))
    facts["delete an unscheduled pod"] = await cluster.request(
        "DELETE", cluster.get_object_path("Pod", "unscheduled"), {"gracePeriodSeconds": 30}
    )
    facts["read the unscheduled pod"] = await cluster.request("GET", cluster.get_object_path("Pod", "unscheduled"))
    await cluster.create(set_namespace(cluster, cluster.build_short_lived_pod("ended")))
    await cluster.wait_for_phase("ended", phase="Failed")
    facts["delete a terminated pod"] = await cluster.request(
        "DELETE", cluster.get_object_path("Pod", "ended"), {"gracePeriodSeconds": 30}
    )
    facts["read the terminated pod"] = await cluster.request("GET", cluster.get_object_path("Pod", "ended"))
    return facts


async def check_event_order(cluster: ClusterUnderTest) -> Facts:
    """Check that all watches from one version receive the same events, one per commit and in commit order."""
    page = await anext(cluster.api.list_pages(collection_path("Pod", cluster.namespace)))
    version = page["metadata"]["resourceVersion"]
    name = "watched"
    await cluster.create(set_namespace(cluster, cluster.build_short_lived_pod(name)))
    await cluster.wait_for_phase(name, phase="Failed")
    await cluster.request("DELETE", cluster.get_object_path("Pod", name))
    events = [event async for event in watch_events(cluster, name, version=version)]
    replayed = [event async for event in watch_events(cluster, name, version=version)]
    versions = [int(event["object"]["metadata"]["resourceVersion"]) for event in events]
    return {
        "types": [
            t
            for t, before in zip(list_event_types(events), [None, *list_event_types(events)], strict=False)
            if t != before
        ],
        "versions increase": versions == sorted(set(versions)),
        "one uid": len({event["object"]["metadata"]["uid"] for event in events}),
        "a second watch receives the same events": list_event_types(events) == list_event_types(replayed),
        # kubelets before 1.36 report both in the same update
        "the container has terminated when the pod phase changes": _is_terminated(
            events[_find_first_index(events, lambda event: get_phase(event) == "Failed")]
        ),
        "the deletion has its own version": versions[-1] > versions[-2],
        "phase in the deletion event": get_phase(events[-1]),
    }


async def check_label_removal(cluster: ClusterUnderTest) -> Facts:
    """Check that a watch with a label selector receives DELETED when the label is removed."""
    path = collection_path("ConfigMap", cluster.namespace)
    version = (await anext(cluster.api.list_pages(path)))["metadata"]["resourceVersion"]
    await cluster.create(set_namespace(cluster, build_config_map("hidden", kept="yes")))
    current = await cluster.read("ConfigMap", "hidden")
    relabelled = {**current, "metadata": {**current["metadata"], "labels": {"kept": "yes"}}}
    facts: Facts = {
        "remove the label": await cluster.request("PUT", cluster.get_object_path("ConfigMap", "hidden"), relabelled)
    }
    events = [
        event async for event in watch_events(cluster, "hidden", version=version, kind="ConfigMap", selector=LABEL)
    ]
    facts["event types"] = list_event_types(events)
    facts["labels of the last event"] = sorted(events[-1]["object"]["metadata"]["labels"])
    newest = (await cluster.read("ConfigMap", "hidden"))["metadata"]["resourceVersion"]
    facts["the version is that of the edit"] = events[-1]["object"]["metadata"]["resourceVersion"] == newest
    return facts


CHECKS = (
    check_name_conflicts_and_uids,
    check_lists,
    check_status_updates,
    check_graceful_deletion,
    check_deletion_without_kubelet,
    check_event_order,
    check_label_removal,
)


async def watch_events(
    cluster: ClusterUnderTest, name: str, *, version: str, kind: str = "Pod", selector: str = ""
) -> AsyncIterator[RawBody]:
    """Yield the watch events of one object until its deletion."""
    path = collection_path(kind, cluster.namespace)
    async with asyncio.timeout(60), aclosing(cluster.api.watch(path, selector=selector, version=version)) as events:  # type: ignore[type-var]
        async for event in events:
            if event["type"] == "BOOKMARK" or event["object"]["metadata"]["name"] != name:
                continue
            yield event
            if event["type"] == "DELETED":
                return


def set_namespace(cluster: ClusterUnderTest, manifest: RawBody) -> RawBody:
    """Return the manifest with the namespace set to that of the cluster under test."""
    return {**manifest, "metadata": {**manifest["metadata"], "namespace": cluster.namespace}}


def list_event_types(events: list[RawBody]) -> list[str]:
    """Return the type of each event."""
    return [event["type"] for event in events]


def get_phase(event: RawBody) -> str:
    """Return the phase of the pod that the event contains."""
    phase: str = event["object"]["status"]["phase"]
    return phase


def _is_terminated(event: RawBody) -> bool:
    statuses = event["object"]["status"].get("containerStatuses") or [{}]
    return "terminated" in statuses[0].get("state", {})


def _find_first_index(events: list[RawBody], predicate: Callable[[RawBody], bool]) -> int:
    return next(index for index, event in enumerate(events) if predicate(event))


async def _write_status(cluster: ClusterUnderTest, path: ApiPath) -> RawBody:
    """Write a status, and retry on a conflict, because a running operator may write at the same time."""
    while True:
        current = await cluster.api.call_once("GET", path)
        try:
            return await cluster.api.call_once(
                "PUT", extend_path(path, "status"), body={**current, "status": {"restarts": 1}}
            )
        except ApiError as error:
            if error.reason != "Conflict":
                raise


async def _is_version_unchanged_by_rewrite(cluster: ClusterUnderTest, path: ApiPath) -> bool:
    while True:
        current = await cluster.api.call_once("GET", path)
        try:
            written = await cluster.api.call_once("PUT", extend_path(path, "status"), body=current)
        except ApiError as error:
            if error.reason != "Conflict":
                raise
            continue
        return bool(written["metadata"]["resourceVersion"] == current["metadata"]["resourceVersion"])
