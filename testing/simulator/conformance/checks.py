"""What the simulated API server claims about a real one: short stories, told to either, and their answers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from finetune_operator import names
from finetune_operator.kube.api_client import ApiError, ApiServer
from finetune_operator.kube.cluster import collection_path, object_path
from finetune_operator.observation.pods import parse_time
from testing.builders.jobs import spec

Raw = dict[str, Any]
Facts = dict[str, Any]
LABEL = "contract"


@dataclass(frozen=True)
class Site:
    """An API server, simulated or real, and pods that behave as their names say there."""

    api: ApiServer
    namespace: str
    endless: Callable[[str], Raw]  # runs and is in no hurry to obey SIGTERM
    brief: Callable[[str], Raw]  # ends soon, with exit 1
    nowhere: Callable[[str], Raw]  # fits no machine

    def path(self, kind: str, name: str) -> str:
        """URL of an object."""
        return object_path(kind, self.namespace, name)

    async def ask(self, method: str, path: str, body: Raw | None = None) -> str:
        """`ok`, or the code and reason of the refusal."""
        try:
            await self.api.call_once(method, path, body=body)
        except ApiError as error:
            return f"{error.status} {error.reason}"
        return "ok"

    async def create(self, manifest: Raw) -> str:
        """POST."""
        return await self.ask("POST", collection_path(manifest["kind"], self.namespace), manifest)

    async def read(self, kind: str, name: str) -> Raw:
        """GET."""
        return await self.api.call_once("GET", self.path(kind, name))

    async def until(self, probe: Callable[[], Awaitable[bool]]) -> None:
        """Until it is so, for at most a minute."""
        async with asyncio.timeout(60):
            while not await probe():  # noqa: ASYNC110  an API server has no asyncio.Event
                await asyncio.sleep(0.05)

    async def pod_until(self, name: str, *, phase: str) -> Raw:
        """The pod, once it is in that phase."""

        async def there() -> bool:
            return bool((await self.read("Pod", name))["status"].get("phase") == phase)

        await self.until(there)
        return await self.read("Pod", name)

    async def gone(self, name: str) -> None:
        """Until the pod is no more."""

        async def absent() -> bool:
            return await self.ask("GET", self.path("Pod", name)) == "404 NotFound"

        await self.until(absent)


def config_map(name: str, **labels: str) -> Raw:
    """An object that nobody else touches."""
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "labels": {LABEL: name, **labels}}}


def job(name: str) -> Raw:
    """A job that never starts."""
    metadata = {"name": name, "labels": {LABEL: name}}
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.FINETUNEJOB_KIND,
        "metadata": metadata,
        "spec": spec(suspend=True),
    }


async def names_and_uids(site: Site) -> Facts:
    """Creating what exists, deleting what is not what was meant, reading what is gone."""
    name = "names"
    facts: Facts = {"create": await site.create(placed(site, config_map(name)))}
    facts["create again"] = await site.create(placed(site, config_map(name)))
    wrong: Raw = {"preconditions": {"uid": "00000000-0000-0000-0000-000000000000"}}
    facts["delete another uid"] = await site.ask("DELETE", site.path("ConfigMap", name), wrong)
    uid = (await site.read("ConfigMap", name))["metadata"]["uid"]
    right = {"preconditions": {"uid": uid}}
    facts["delete this uid"] = await site.ask("DELETE", site.path("ConfigMap", name), right)
    facts["delete what is gone"] = await site.ask("DELETE", site.path("ConfigMap", name), right)
    facts["read what is gone"] = await site.ask("GET", site.path("ConfigMap", name))
    facts["create anew"] = await site.create(placed(site, config_map(name)))
    facts["a new uid"] = (await site.read("ConfigMap", name))["metadata"]["uid"] != uid
    facts["the old uid is no precondition for the new"] = await site.ask("DELETE", site.path("ConfigMap", name), right)
    return facts


async def lists(site: Site) -> Facts:
    """What a selector finds, and that a list knows every commit before it."""
    for name in ("list-a", "list-b"):
        await site.create(placed(site, config_map(name, shape="round" if name == "list-a" else "flat")))
    newest = await site.read("ConfigMap", "list-b")
    pages = [page async for page in site.api.pages(collection_path("ConfigMap", site.namespace), selector="shape=flat")]
    return {
        "selected": [item["metadata"]["name"] for page in pages for item in page["items"]],
        "kind": pages[0]["kind"],
        "as new as the newest": int(pages[0]["metadata"]["resourceVersion"])
        >= int(newest["metadata"]["resourceVersion"]),
    }


async def status_of_a_job(site: Site) -> Facts:
    """The lock that keeps two writers of a status apart."""
    name = "locked"
    facts: Facts = {"create": await site.create(placed(site, job(name)))}
    path = site.path(names.FINETUNEJOB_KIND, name)
    seen = await _write_once(site, path)
    facts["the spec stays"] = (await site.read(names.FINETUNEJOB_KIND, name))["spec"] == seen["spec"]
    facts["generation"] = seen["metadata"]["generation"]
    facts["an unchanged status is no new version"] = await _unchanged(site, path)
    stale = {**seen, "metadata": {**seen["metadata"], "resourceVersion": "1"}, "status": {"restarts": 7}}
    facts["a status on an old version"] = await site.ask("PUT", f"{path}/status", stale)
    other = {**seen, "metadata": {**seen["metadata"], "uid": "other"}, "status": {"restarts": 8}}
    del other["metadata"]["resourceVersion"]
    facts["a status of another uid"] = await site.ask("PUT", f"{path}/status", other)
    facts["delete in the background"] = await site.ask("DELETE", path, {"propagationPolicy": "Background"})
    facts["gone at once"] = await site.ask("GET", path)
    facts["a status of what is gone"] = await site.ask("PUT", f"{path}/status", seen)
    return facts


async def graceful_deletion(site: Site) -> Facts:
    """A pod with a kubelet goes in its own time, which can only be made shorter, and keeps its name meanwhile."""
    name = "leaving"
    facts: Facts = {"create": await site.create(placed(site, site.endless(name)))}
    await site.pod_until(name, phase="Running")
    path = site.path("Pod", name)
    deadlines: list[datetime] = []
    for seconds in (20, 40, 8):
        facts[f"delete within {seconds} s"] = await site.ask("DELETE", path, {"gracePeriodSeconds": seconds})
        metadata = (await site.read("Pod", name))["metadata"]
        facts[f"grace after that of {seconds} s"] = metadata["deletionGracePeriodSeconds"]
        deadline = parse_time(metadata["deletionTimestamp"])
        assert deadline is not None
        deadlines.append(deadline)
    facts["deadlines move by"] = [(deadline - deadlines[0]).total_seconds() for deadline in deadlines]
    facts["the name is taken meanwhile"] = await site.create(placed(site, site.endless(name)))
    facts["it runs meanwhile"] = (await site.read("Pod", name))["status"]["phase"]
    await site.gone(name)
    facts["the name is free after"] = await site.create(placed(site, site.endless(name)))
    facts["by force"] = await site.ask("DELETE", path, {"gracePeriodSeconds": 0})
    facts["gone at once"] = await site.ask("GET", path)
    return facts


async def deletion_without_a_kubelet(site: Site) -> Facts:
    """A pod that was never placed, and one that has ended, need no grace."""
    facts: Facts = {}
    await site.create(placed(site, site.nowhere("unplaced")))
    facts["unplaced"] = await site.ask("DELETE", site.path("Pod", "unplaced"), {"gracePeriodSeconds": 30})
    facts["unplaced, then"] = await site.ask("GET", site.path("Pod", "unplaced"))
    await site.create(placed(site, site.brief("ended")))
    await site.pod_until("ended", phase="Failed")
    facts["ended"] = await site.ask("DELETE", site.path("Pod", "ended"), {"gracePeriodSeconds": 30})
    facts["ended, then"] = await site.ask("GET", site.path("Pod", "ended"))
    return facts


async def order_of_events(site: Site) -> Facts:
    """A watch tells every commit once, in order, and again in the same order to who asks from the same version."""
    page = await anext(site.api.pages(collection_path("Pod", site.namespace)))
    version = page["metadata"]["resourceVersion"]
    name = "watched"
    await site.create(placed(site, site.brief(name)))
    await site.pod_until(name, phase="Failed")
    await site.ask("DELETE", site.path("Pod", name))
    first = [event async for event in events_of(site, name, version=version)]
    again = [event async for event in events_of(site, name, version=version)]
    versions = [int(event["object"]["metadata"]["resourceVersion"]) for event in first]
    return {
        "types": [t for t, before in zip(kinds(first), [None, *kinds(first)], strict=False) if t != before],
        "versions rise": versions == sorted(set(versions)),
        "one uid": len({event["object"]["metadata"]["uid"] for event in first}),
        "told again": kinds(first) == kinds(again),
        "the container's end before the pod's": state_of(first[_first(first, _ended)]) == "Running",
        "the deletion has a version of its own": versions[-1] > versions[-2],
        "the deletion carries the last state": state_of(first[-1]),
    }


async def labels_taken_away(site: Site) -> Facts:
    """Who selects by a label is told that an object which loses it is deleted, in its last state that had it."""
    path = collection_path("ConfigMap", site.namespace)
    version = (await anext(site.api.pages(path)))["metadata"]["resourceVersion"]
    await site.create(placed(site, config_map("hidden", kept="yes")))
    there = await site.read("ConfigMap", "hidden")
    bare = {**there, "metadata": {**there["metadata"], "labels": {"kept": "yes"}}}
    facts: Facts = {"edited": await site.ask("PUT", site.path("ConfigMap", "hidden"), bare)}
    events = [event async for event in events_of(site, "hidden", version=version, kind="ConfigMap", selector=LABEL)]
    facts["told"] = kinds(events)
    facts["labels"] = sorted(events[-1]["object"]["metadata"]["labels"])
    newest = (await site.read("ConfigMap", "hidden"))["metadata"]["resourceVersion"]
    facts["version is that of the edit"] = events[-1]["object"]["metadata"]["resourceVersion"] == newest
    return facts


STORIES = (
    names_and_uids,
    lists,
    status_of_a_job,
    graceful_deletion,
    deletion_without_a_kubelet,
    order_of_events,
    labels_taken_away,
)


async def events_of(
    site: Site, name: str, *, version: str, kind: str = "Pod", selector: str = ""
) -> AsyncIterator[Raw]:
    """The events of one object until it is deleted."""
    path = collection_path(kind, site.namespace)
    async with asyncio.timeout(60), aclosing(site.api.watch(path, selector=selector, version=version)) as events:  # type: ignore[type-var]
        async for event in events:
            if event["type"] == "BOOKMARK" or event["object"]["metadata"]["name"] != name:
                continue
            yield event
            if event["type"] == "DELETED":
                return


def placed(site: Site, manifest: Raw) -> Raw:
    """The manifest in the site's namespace."""
    return {**manifest, "metadata": {**manifest["metadata"], "namespace": site.namespace}}


def kinds(events: list[Raw]) -> list[str]:
    """Their types."""
    return [event["type"] for event in events]


def state_of(event: Raw) -> str:
    """Phase of the pod that an event tells of."""
    phase: str = event["object"]["status"]["phase"]
    return phase


def _ended(event: Raw) -> bool:
    statuses = event["object"]["status"].get("containerStatuses") or [{}]
    return "terminated" in statuses[0].get("state", {})


def _first(events: list[Raw], holds: Callable[[Raw], bool]) -> int:
    return next(index for index, event in enumerate(events) if holds(event))


async def _write_once(site: Site, path: str) -> Raw:
    """A status written on the newest version; an operator that is there may write in between."""
    while True:
        there = await site.api.call_once("GET", path)
        try:
            return await site.api.call_once("PUT", f"{path}/status", body={**there, "status": {"restarts": 1}})
        except ApiError as error:
            if error.reason != "Conflict":
                raise


async def _unchanged(site: Site, path: str) -> bool:
    while True:
        there = await site.api.call_once("GET", path)
        try:
            written = await site.api.call_once("PUT", f"{path}/status", body=there)
        except ApiError as error:
            if error.reason != "Conflict":
                raise
            continue
        return bool(written["metadata"]["resourceVersion"] == there["metadata"]["resourceVersion"])
