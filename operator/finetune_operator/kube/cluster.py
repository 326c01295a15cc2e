"""The operator's only writes to the cluster, and the reads that must not come from a cache."""

import logging
from dataclasses import dataclass
from typing import Protocol

from finetune_operator import names
from finetune_operator.kube.api_client import ApiError, ApiServer, Raw
from finetune_operator.observation.pods import controlling_owner, is_labelled

logger = logging.getLogger(__name__)


class ClusterError(Exception):
    """Try again later, not before `retry_after` seconds if the API server named a time."""

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Conflict(ClusterError):
    """The job was changed since it was read; the newer one is on its way."""


class NotFound(ClusterError):
    """The job is gone."""


class Refused(ClusterError):
    """The cluster does not let this object be: quota, admission, PodSecurity, or it is invalid."""

    def __init__(self, message: str, *, status: int, kind: str, name: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.name = name
        self.message = message


class NameTaken(ClusterError):
    """An object of this name is there and not ours; `leaving` where it follows its owner, which is gone."""

    def __init__(self, *, kind: str, name: str, leaving: bool = False) -> None:
        foreign = "exists and is not this job's; delete it or rename the job"
        super().__init__(f"{kind} {name} {'of a deleted job of the same name is still there' if leaving else foreign}")
        self.kind = kind
        self.name = name
        self.leaving = leaving


@dataclass(frozen=True)
class ObjectRef:
    """One object, not merely one name: the uid tells it from a later one of the same name.

    Where the uid is not known it is empty, and only an object that a FineTuneJob controls is meant.
    """

    kind: str
    namespace: str
    name: str
    uid: str


class Cluster(Protocol):
    """What reconciling may do to a cluster."""

    async def write_status(self, job: Raw, status: Raw) -> Raw:
        """Replace the status of the job as it was read; the new object comes back."""

    async def list_pods(self, namespace: str, job_uid: str) -> tuple[Raw, ...]:
        """The job's pods as they are now, not as a cache has them."""

    async def get(self, kind: str, namespace: str, name: str) -> Raw | None:
        """The object of that name, if it is there."""

    async def create(self, manifest: Raw) -> None:
        """Make the object; one that is there already and is the same owner's is as good."""

    async def delete(self, target: ObjectRef, *, grace_seconds: int | None = None) -> None:
        """Delete this very object; gone, or replaced by another, is as good."""

    async def emit_event(self, event: Raw) -> None:
        """Tell people; what cannot be told is logged."""


COLLECTIONS = {
    "Pod": ("/api/v1", "pods"),
    "Service": ("/api/v1", "services"),
    "ConfigMap": ("/api/v1", "configmaps"),
    "PersistentVolumeClaim": ("/api/v1", "persistentvolumeclaims"),
    "Event": ("/api/v1", "events"),
    names.FINETUNEJOB_KIND: (f"/apis/{names.API_VERSION}", names.FINETUNEJOB[2]),
}
REFUSALS = frozenset({400, 403, 413, 422})
WEBHOOK_FAILED = "failed calling webhook"  # with status 500, while the API server itself is well


def collection_path(kind: str, namespace: str | None) -> str:
    """URL path of all objects of a kind, in one namespace or in all."""
    root, plural = COLLECTIONS[kind]
    return f"{root}/{plural}" if namespace is None else f"{root}/namespaces/{namespace}/{plural}"


def object_path(kind: str, namespace: str, name: str) -> str:
    """URL path of one object."""
    return f"{collection_path(kind, namespace)}/{name}"


class KubernetesCluster:
    """A Cluster behind an API server."""

    def __init__(self, api: ApiServer) -> None:
        self._api = api

    async def write_status(self, job: Raw, status: Raw) -> Raw:
        """PUT with the resourceVersion and uid of `job`, so that neither a change nor a successor is overwritten."""
        metadata = job["metadata"]
        kept = {key: metadata[key] for key in ("name", "namespace", "uid", "resourceVersion")}
        body = {
            "apiVersion": names.API_VERSION,
            "kind": names.FINETUNEJOB_KIND,
            "metadata": kept,
            "spec": job.get("spec", {}),
            "status": status,
        }
        path = object_path(names.FINETUNEJOB_KIND, kept["namespace"], kept["name"]) + "/status"
        try:
            return await self._api.call("PUT", path, body=body, repeatable=False)
        except ApiError as error:
            if error.status == 404:
                raise NotFound(error.message) from error
            if error.status == 409:
                raise Conflict(error.message) from error
            raise ClusterError(error.message, retry_after=error.retry_after) from error

    async def list_pods(self, namespace: str, job_uid: str) -> tuple[Raw, ...]:
        """A consistent read: no resourceVersion is given."""
        path = collection_path("Pod", namespace)
        try:
            pages = [page async for page in self._api.pages(path, selector=f"{names.JOB_UID}={job_uid}")]
        except ApiError as error:
            raise ClusterError(error.message, retry_after=error.retry_after) from error
        return tuple(pod for page in pages for pod in page["items"])

    async def get(self, kind: str, namespace: str, name: str) -> Raw | None:
        """None only where the API server says so."""
        try:
            return await self._api.call("GET", object_path(kind, namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise ClusterError(error.message, retry_after=error.retry_after) from error

    async def create(self, manifest: Raw) -> None:
        """A lost answer is asked again, which is safe: the name is taken by then, and by us."""
        kind, metadata = manifest["kind"], manifest["metadata"]
        try:
            await self._api.call("POST", collection_path(kind, metadata["namespace"]), body=manifest)
        except ApiError as error:
            if error.status == 409 and error.reason == "AlreadyExists":
                await self._accept_existing(manifest)
            elif error.status in REFUSALS or WEBHOOK_FAILED in error.message:
                raise Refused(error.message, status=error.status, kind=kind, name=metadata["name"]) from error
            else:  # among them 409 Conflict: two creates raced for the same quota
                raise ClusterError(error.message, retry_after=error.retry_after) from error

    async def delete(self, target: ObjectRef, *, grace_seconds: int | None = None) -> None:
        """Children of a deleted job go in the background; foreground would keep the job until its pods are gone."""
        uid = target.uid or await self._find_ours(target)
        if uid is None:
            return
        options: Raw = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": uid}}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        if target.kind == names.FINETUNEJOB_KIND:
            options["propagationPolicy"] = "Background"
        try:
            await self._api.call("DELETE", object_path(target.kind, target.namespace, target.name), body=options)
        except ApiError as error:
            if error.status == 404:
                return
            if error.status == 409 and await self._is_replaced(target, uid):
                return
            raise ClusterError(error.message, retry_after=error.retry_after) from error

    async def emit_event(self, event: Raw) -> None:
        """The name is derived from what is said, so 409 means that it was said before."""
        metadata = event["metadata"]
        try:
            await self._api.call("POST", collection_path("Event", metadata["namespace"]), body=event)
        except ApiError as error:
            if error.status != 409:
                said = {"event": event.get("reason"), "object": metadata["name"]}
                logger.warning("event not written: %s", error.message, extra=said)

    async def _accept_existing(self, manifest: Raw) -> None:
        kind, namespace, name = manifest["kind"], manifest["metadata"]["namespace"], manifest["metadata"]["name"]
        there = await self.get(kind, namespace, name)
        if there is None:
            raise ClusterError(f"{kind} {name} vanished while it was looked at")
        theirs, ours = controlling_owner(there), controlling_owner(manifest)
        if theirs.get("uid") != ours.get("uid"):
            # of two jobs with one name the other is gone, and the garbage collector will come for what it left
            raise NameTaken(kind=kind, name=name, leaving=_full_name(theirs) == _full_name(ours))
        if "deletionTimestamp" in there["metadata"]:
            raise ClusterError(f"{kind} {name} is still being deleted")
        if not is_labelled(there):
            await self.delete(ObjectRef(kind, namespace, name, there["metadata"]["uid"]))
            raise ClusterError(f"{kind} {name} had lost its labels, so that no watch tells of it; it is made again")

    async def _find_ours(self, target: ObjectRef) -> str | None:
        there = await self.get(target.kind, target.namespace, target.name)
        if there is None or controlling_owner(there).get("kind") != names.FINETUNEJOB_KIND:
            return None
        uid: str = there["metadata"]["uid"]
        return uid

    async def _is_replaced(self, target: ObjectRef, uid: str) -> bool:
        there = await self.get(target.kind, target.namespace, target.name)
        return there is None or there["metadata"]["uid"] != uid


async def read_job(api: ApiServer, job: Raw) -> Raw:
    """The job as it is now; NotFound if it is gone, even if another has its name."""
    metadata = job["metadata"]
    there = await KubernetesCluster(api).get(names.FINETUNEJOB_KIND, metadata["namespace"], metadata["name"])
    if there is None or there["metadata"]["uid"] != metadata["uid"]:
        raise NotFound(f"{metadata['name']} was deleted")
    return there


def _full_name(owner: Raw) -> tuple[str, str, str]:
    """API group, kind and name, which no two objects of a namespace share at a time."""
    return owner.get("apiVersion", "").partition("/")[0], owner.get("kind", ""), owner.get("name", "")
