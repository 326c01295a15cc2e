"""Cache of pods and services, indexed by job, with tombstones of deleted pods."""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from finetune_operator import names
from finetune_operator.controller.tombstones import Tombstone, prune_tombstones
from finetune_operator.observation.ownership import RawBody, find_owning_job
from finetune_operator.observation.projection import project_ended_pod


class JobKey(NamedTuple):
    """Identity of a job; the uid is used because a deleted job can be recreated under the same name."""

    namespace: str
    uid: str


class ChildCache:
    """Cache of the children of all jobs; calls `on_change` with the key of each changed job."""

    def __init__(
        self,
        *,
        on_change: Callable[[JobKey], None],
        current_attempt: Callable[[JobKey], int | None],
        is_current_pod: Callable[[JobKey, RawBody], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_change = on_change
        self._current_attempt = current_attempt
        self._is_current_pod = is_current_pod  # whether the operator created a pod for the current attempt
        self._clock = clock
        self._pods: defaultdict[JobKey, dict[str, RawBody]] = defaultdict(dict)  # inner key: uid of the pod
        self._services: defaultdict[JobKey, dict[str, RawBody]] = defaultdict(dict)  # inner key: uid of the service
        self._tombstones: dict[JobKey, tuple[Tombstone, ...]] = {}

    def on_pod_event(self, old_pod: RawBody | None, new_pod: RawBody | None) -> None:
        """Handle a pod event of an informer; a deleted pod leaves a tombstone."""
        if old_pod is not None and new_pod is None and (key := get_owning_job_key(old_pod)):
            attempt = self._current_attempt(key) if self._is_current_pod(key, old_pod) else None
            tombstone = Tombstone(old_pod, self._clock(), attempt)
            self._store_tombstones(key, (*self._tombstones.get(key, ()), tombstone))
        self._update_index(self._pods, old_pod, new_pod)

    def on_service_event(self, old_service: RawBody | None, new_service: RawBody | None) -> None:
        """Handle a service event of an informer."""
        self._update_index(self._services, old_service, new_service)

    def list_keys(self) -> set[JobKey]:
        """Return the keys of all jobs of which a pod or Service exists."""
        return {*self._pods, *self._services}

    def pods(self, key: JobKey) -> tuple[RawBody, ...]:
        """Return the existing pods of all attempts of the job."""
        return tuple(self._pods.get(key, {}).values())

    def reduce_ended_pods(self, key: JobKey) -> tuple[RawBody, ...]:
        """Replace the ended pods of a finished job by their identities, and return the replacements."""
        pods = self._pods.get(key, {})
        reduced_pods = [reduced for pod in pods.values() if "spec" in pod and (reduced := project_ended_pod(pod))]
        pods.update({pod["metadata"]["uid"]: pod for pod in reduced_pods})
        return tuple(reduced_pods)

    def services(self, key: JobKey) -> tuple[RawBody, ...]:
        """Return the existing services of the job."""
        return tuple(self._services.get(key, {}).values())

    def deleted_pods(self, key: JobKey) -> tuple[RawBody, ...]:
        """Return the last known objects of the job's deleted pods, in order of deletion."""
        return tuple(tombstone.pod for tombstone in self._tombstones.get(key, ()))

    def forget(self, key: JobKey) -> None:
        """Drop the tombstones of a deleted job; the deletion events of its remaining pods remove those pods."""
        self._tombstones.pop(key, None)

    def prune(self) -> None:
        """Drop expired tombstones, for example of pods that were deleted after their job."""
        for key, tombstones in list(self._tombstones.items()):
            self._store_tombstones(key, tombstones)

    def _store_tombstones(self, key: JobKey, tombstones: tuple[Tombstone, ...]) -> None:
        retained = prune_tombstones(tombstones, current_attempt=self._current_attempt(key), now=self._clock())
        if retained:
            self._tombstones[key] = retained
        else:
            self._tombstones.pop(key, None)

    def _update_index(
        self, index: defaultdict[JobKey, dict[str, RawBody]], old_body: RawBody | None, new_body: RawBody | None
    ) -> None:
        old_key, new_key = (None if body is None else get_owning_job_key(body) for body in (old_body, new_body))
        if old_body is not None and old_key is not None and old_key != new_key:
            index[old_key].pop(old_body["metadata"]["uid"], None)
            if not index[old_key]:
                del index[old_key]
        if new_body is not None and new_key is not None:
            index[new_key][new_body["metadata"]["uid"]] = new_body
        for key in {old_key, new_key} - {None}:
            self._on_change(key)  # type: ignore[arg-type]


def get_owning_job_key(body: RawBody) -> JobKey | None:
    """Return the key of the job in the labels of an object that a job controls, otherwise None."""
    metadata = body["metadata"]
    uid = metadata.get("labels", {}).get(names.JOB_UID)
    return JobKey(metadata["namespace"], uid) if uid and find_owning_job(body) else None
