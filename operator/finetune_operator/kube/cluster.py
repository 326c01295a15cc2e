"""Cluster operations of the operator: all writes, and the reads that bypass the caches."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from finetune_operator import names
from finetune_operator.kube.api_client import ApiClient, ApiError
from finetune_operator.kube.api_paths import GROUPS_PATH, ApiPath, InvalidName, collection_path, object_path
from finetune_operator.kube.missing_rights import parse_missing_right
from finetune_operator.kube.queue_positions import QueuePositions
from finetune_operator.kube.read_batcher import ReadBatcher
from finetune_operator.observation.ownership import (
    JobOwner,
    RawBody,
    find_owning_job,
    get_group_kind_name,
    get_start_key,
    has_job_label,
)

logger = logging.getLogger(__name__)


class ClusterError(Exception):
    """Error after which the pass is retried, with a delay of at least `retry_after` seconds if set."""

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Conflict(ClusterError):
    """The job was modified after it was read; the watch delivers the newer version."""


class NotFound(ClusterError):
    """The job was deleted after it was read."""


class CreateRejected(ClusterError):
    """The API server rejected a create request, for example because of a quota, admission or validation."""

    def __init__(self, message: str, *, status: int, kind: str, name: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.name = name
        self.message = message


class NameTaken(ClusterError):
    """An object with a different owner already has the name.

    predecessor_terminating: The owner is a deleted job of the same name, so the garbage collector deletes the object.
    """

    def __init__(self, *, kind: str, name: str, predecessor_terminating: bool = False) -> None:
        leftover = "of a deleted job of the same name is still there"
        foreign = "exists and is not this job's; delete it or rename the job"
        super().__init__(f"{kind} {name} {leftover if predecessor_terminating else foreign}")
        self.kind = kind
        self.name = name
        self.predecessor_terminating = predecessor_terminating


@dataclass(frozen=True)
class ObjectRef:
    """Identity of one object; the uid distinguishes it from a later object of the same name.

    An empty uid matches any object of that name that `owner` controls, and a Workload whose owners are pods of it.

    pod_uids: uids of pods; one of them must own the Workload. None if `owner` is known to be right.
    """

    kind: str
    namespace: str
    name: str
    uid: str
    owner: JobOwner | None = None
    pod_uids: frozenset[str] | None = None


class Cluster(Protocol):
    """Cluster operations that a reconcile pass uses."""

    async def write_status(self, job: RawBody, status: RawBody) -> RawBody:
        """Replace the status of the job unless the job was modified after it was read; return the new object."""

    async def list_pods(self, namespace: str, label: str, value: str) -> tuple[RawBody, ...]:
        """Return the pods with this label from the API server, not from a cache."""

    async def get(self, kind: str, namespace: str, name: str) -> RawBody | None:
        """Return the named object, or None if it does not exist."""

    async def create(self, manifest: RawBody) -> str:
        """Create the object and return its uid; succeed if it already exists and is the operator's own."""

    async def dry_run_create(self, manifest: RawBody) -> RawBody:
        """Return the object that `create` would create."""

    async def list_api_versions(self) -> tuple[str, ...]:
        """Return the served API groups with their versions, such as `kueue.x-k8s.io/v1beta2`."""

    async def list_queue_positions(self, namespace: str, queue_name: str) -> Mapping[str, int]:
        """Return the Workloads that wait in a LocalQueue, with the number of those ahead; empty if unknown."""

    async def delete(self, target: ObjectRef, *, grace_seconds: int | None = None) -> None:
        """Delete the object with this uid; succeed if the object is gone or was replaced."""

    async def emit_event(self, event: RawBody) -> None:
        """Create the Event; failures are logged, not raised."""


REJECTION_STATUS_CODES = frozenset({400, 403, 413, 422})
MAX_REMEMBERED_CONFIG_MAPS = 10_000
WEBHOOK_FAILURE_TEXT = "failed calling webhook"  # webhook failures have status 500 even if the API server is healthy


def get_collection_kind(manifest: RawBody) -> str:
    """Return the key of COLLECTIONS for an object: its kind, with the API version if several projects have the kind."""
    kind: str = manifest["kind"]
    return f"{manifest['apiVersion']}/{kind}" if kind == names.POD_GROUP_KIND else kind


class KubernetesCluster:
    """Implementation of Cluster that sends requests to the API server."""

    def __init__(self, api: ApiClient) -> None:
        self._api = api
        self._pod_lists = ReadBatcher(self._list_pods_by_label)
        self._objects = ReadBatcher(self._get_object)
        self._queue_positions = QueuePositions(api)
        # uids of the newest ConfigMaps by namespace, name and owner
        self._config_map_uids: dict[tuple[str, str, JobOwner | None], str] = {}

    async def write_status(self, job: RawBody, status: RawBody) -> RawBody:
        """Replace the status unless the resourceVersion or uid of the job has changed.

        Raises:
            Conflict: The job was modified after it was read.
            NotFound: The job was deleted after it was read.
            ClusterError: Any other error.
        """
        metadata = {key: job["metadata"][key] for key in ("name", "namespace", "uid", "resourceVersion")}
        body = {
            "apiVersion": names.API_VERSION,
            "kind": names.FINETUNEJOB_KIND,
            "metadata": metadata,
            "spec": job.get("spec", {}),
            "status": status,
        }
        path = object_path(names.FINETUNEJOB_KIND, metadata["namespace"], metadata["name"], "status")
        try:
            return await self._api.call("PUT", path, body=body, idempotent=False)
        except ApiError as error:
            if error.status == 404:
                raise NotFound(error.message) from error
            if error.status == 409:
                raise Conflict(error.message) from error
            raise ClusterError(error.message, retry_after=error.retry_after) from error

    async def list_pods(self, namespace: str, label: str, value: str) -> tuple[RawBody, ...]:
        """List the pods with this label with a consistent read, for which resourceVersion is unset.

        Raises: ClusterError
        """
        try:
            return await self._pod_lists.read((namespace, label), value)
        except ApiError as error:
            raise ClusterError(error.message, retry_after=error.retry_after) from error

    async def get(self, kind: str, namespace: str, name: str) -> RawBody | None:
        """Return the object, or None if the API server returns 404; raise ClusterError for any other failure."""
        try:
            return await self._objects.read(_find_path(kind, namespace, name), None)
        except ApiError as error:
            if error.status == 404:
                return None
            raise ClusterError(error.message, retry_after=error.retry_after) from error

    async def create(self, manifest: RawBody) -> str:
        """Create the object and return its uid. A retry is safe, because it finds the object of a lost response.

        Raises:
            CreateRejected: The API server rejected the object.
            NameTaken: An object with a different owner already has the name.
            ClusterError: Any other error.
        """
        kind, metadata = manifest["kind"], manifest["metadata"]
        try:
            path = collection_path(get_collection_kind(manifest), metadata["namespace"])
            created = await self._api.call("POST", path, body=manifest)
        except ApiError as error:
            if error.status == 409 and error.reason == "AlreadyExists":
                return await self._accept_existing_object(manifest)
            if _is_rejection(error):
                raise CreateRejected(error.message, status=error.status, kind=kind, name=metadata["name"]) from error
            # for example 409 Conflict, after concurrent creates updated the same quota
            raise ClusterError(error.message, retry_after=error.retry_after) from error
        if kind == "ConfigMap":
            self._remember_config_map(created)
        uid: str = created["metadata"]["uid"]
        return uid

    async def dry_run_create(self, manifest: RawBody) -> RawBody:
        """Return the object as admission and defaulting would store it, under a generated name.

        With its own name, the request would fail with 409 while another object has this name.

        Raises:
            CreateRejected: The API server rejected the object.
            ClusterError: Any other error.
        """
        kind, metadata = manifest["kind"], manifest["metadata"]
        path = collection_path(get_collection_kind(manifest), metadata["namespace"])
        other_metadata = {field: value for field, value in metadata.items() if field != "name"}
        nameless = {**manifest, "metadata": {**other_metadata, "generateName": f"{metadata['name']}-"}}
        try:
            return await self._api.call("POST", path, body=nameless, params={"dryRun": "All"})
        except ApiError as error:
            if _is_rejection(error):
                raise CreateRejected(error.message, status=error.status, kind=kind, name=metadata["name"]) from error
            raise ClusterError(error.message, retry_after=error.retry_after) from error

    async def list_api_versions(self) -> tuple[str, ...]:
        """Return the served API groups with their versions, from the discovery document. Raises: ClusterError"""
        try:
            groups = await self._api.call("GET", GROUPS_PATH)
        except ApiError as error:
            raise ClusterError(error.message, retry_after=error.retry_after) from error
        return tuple(version["groupVersion"] for group in groups["groups"] for version in group["versions"])

    async def list_queue_positions(self, namespace: str, queue_name: str) -> Mapping[str, int]:
        """Return the positions in a LocalQueue, which are at most a few seconds old."""
        return await self._queue_positions.list(namespace, queue_name)

    async def delete(self, target: ObjectRef, *, grace_seconds: int | None = None) -> None:
        """Delete the object. Jobs are deleted with background propagation, that is, before their children."""
        uid = target.uid or await self._find_controlled_uid(target)
        if uid is None:
            return
        options: RawBody = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": uid}}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        if target.kind == names.FINETUNEJOB_KIND:
            options["propagationPolicy"] = "Background"
        try:
            await self._api.call("DELETE", _find_path(target.kind, target.namespace, target.name), body=options)
        except ApiError as error:
            if error.status == 404:
                return
            if error.status == 409 and await self._is_replaced(target, uid):
                return
            raise ClusterError(error.message, retry_after=error.retry_after) from error

    async def emit_event(self, event: RawBody) -> None:
        """Create the Event. Its name is derived from its content, so 409 means that it already exists."""
        metadata = event["metadata"]
        try:
            await self._api.call("POST", collection_path("Event", metadata["namespace"]), body=event)
        except ApiError as error:
            if error.status != 409 and not parse_missing_right(error.message):
                fields = {"event": event.get("reason"), "object": metadata["name"]}
                logger.warning("event not written: %s", error.message, extra=fields)

    async def _list_pods_by_label(
        self, group: tuple[str, str], values: tuple[str, ...]
    ) -> Mapping[str, tuple[RawBody, ...]]:
        """List the pods of a namespace that have one of these values of a label, with one request."""
        namespace, label = group
        selector = f"{label}={values[0]}" if len(values) == 1 else f"{label} in ({','.join(values)})"
        pods: dict[str, list[RawBody]] = {value: [] for value in values}
        async for page in self._api.list_pages(collection_path("Pod", namespace), selector=selector):
            for pod in page["items"]:
                pods[pod["metadata"]["labels"][label]].append(pod)
        return {value: tuple(pods_of_value) for value, pods_of_value in pods.items()}

    async def _get_object(self, path: ApiPath, _keys: tuple[None, ...]) -> Mapping[None, RawBody]:
        return {None: await self._api.call("GET", path)}

    async def _accept_existing_object(self, manifest: RawBody) -> str:
        """Return the uid of the object that has the name, if a request of the operator created it."""
        kind = get_collection_kind(manifest)
        namespace, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
        existing = await self.get(kind, namespace, name)
        if existing is None:
            raise ClusterError(f"{kind} {name} was deleted while the operator checked its owner")
        existing_owner, owner = find_owning_job(existing), find_owning_job(manifest)
        if existing_owner != owner:
            # If both owners have the same name, the older one was deleted, and the garbage collector deletes its
            # children (decisions/205).
            has_same_name = existing_owner is not None and owner is not None and existing_owner.name == owner.name
            raise NameTaken(kind=kind, name=name, predecessor_terminating=has_same_name)
        if "deletionTimestamp" in existing["metadata"]:
            raise ClusterError(f"{kind} {name} is still being deleted")
        if (start_key := get_start_key(manifest)) and get_start_key(existing) != start_key:
            raise NameTaken(kind=kind, name=name)
        uid: str = existing["metadata"]["uid"]
        # the creator of an object can write any owner reference, so its content is compared as well (decisions/120)
        if any(existing.get(field) != manifest.get(field) for field in ("data", "binaryData")):
            problem = "had other content than this attempt needs"
        elif not has_job_label(existing):
            problem = "had lost its labels, so that no watch selects it"
        else:
            return uid
        await self.delete(ObjectRef(kind, namespace, name, uid))
        raise ClusterError(f"{kind} {name} {problem}; it is created again")

    def _remember_config_map(self, created: RawBody) -> None:
        """Keep the uid of a created ConfigMap, so that its deletion needs no GET."""
        metadata = created["metadata"]
        key = metadata["namespace"], metadata["name"], find_owning_job(created)
        self._config_map_uids[key] = metadata["uid"]
        if len(self._config_map_uids) > MAX_REMEMBERED_CONFIG_MAPS:
            del self._config_map_uids[next(iter(self._config_map_uids))]

    async def _find_controlled_uid(self, target: ObjectRef) -> str | None:
        key = target.namespace, target.name, target.owner
        if target.kind == "ConfigMap" and (created_uid := self._config_map_uids.pop(key, None)):
            return created_uid
        existing = await self.get(target.kind, target.namespace, target.name)
        if existing is None:
            return None
        if target.kind == names.WORKLOAD_KIND:
            is_controlled = _is_owned_by_pods(existing, target)
        else:
            is_controlled = find_owning_job(existing) == target.owner
        uid: str = existing["metadata"]["uid"]
        return uid if is_controlled else None

    async def _is_replaced(self, target: ObjectRef, uid: str) -> bool:
        existing = await self.get(target.kind, target.namespace, target.name)
        return existing is None or existing["metadata"]["uid"] != uid


def _is_owned_by_pods(workload: RawBody, target: ObjectRef) -> bool:
    """Return whether all owners of a Workload are pods of the job; the pods of its group own it, none controls it."""
    owners = workload["metadata"].get("ownerReferences") or ()
    job_name, pod_uids = "" if target.owner is None else target.owner.name, target.pod_uids
    return (
        bool(owners)
        and all(get_group_kind_name(owner)[:2] == ("", "Pod") for owner in owners)
        and all(names.parse_pod_name(owner["name"], job_name) for owner in owners)
        and (pod_uids is None or any(owner["uid"] in pod_uids for owner in owners))
    )


def _find_path(kind: str, namespace: str, name: str) -> ApiPath:
    """Return the path of an object whose name may come from another object. Raises: ClusterError"""
    try:
        return object_path(kind, namespace, name)
    except InvalidName as error:
        raise ClusterError(f"{kind} of namespace {namespace}: {error}") from error


def _is_rejection(error: ApiError) -> bool:
    """Return whether the object was rejected, so that only a change of the object or the cluster helps."""
    return error.status in REJECTION_STATUS_CODES or WEBHOOK_FAILURE_TEXT in error.message


async def read_job(api: ApiClient, job: RawBody) -> RawBody:
    """Read the job from the API server.

    Raises:
        NotFound: The job was deleted, even if a new job has the same name.
    """
    metadata = job["metadata"]
    current = await KubernetesCluster(api).get(names.FINETUNEJOB_KIND, metadata["namespace"], metadata["name"])
    if current is None or current["metadata"]["uid"] != metadata["uid"]:
        raise NotFound(f"{metadata['name']} was deleted")
    return current
