"""Cache of the pods and services of every job, indexed by job, with tombstones of deleted pods."""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from finetune_operator import names
from finetune_operator.controller.tombstones import Tombstone, prune_tombstones
from finetune_operator.observation.ownership import RawBody


class JobKey(NamedTuple):
    """Identity of a job: the uid, not the name, because a job can be deleted and created again under its name."""

    namespace: str
    uid: str


class ChildCache:
    """The children that the informers deliver, indexed by job; calls `on_change` with the key of each changed job."""

    def __init__(
        self,
        *,
        on_change: Callable[[JobKey], None],
        current_attempt: Callable[[JobKey], int | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_change = on_change
        self._current_attempt = current_attempt
        self._clock = clock
        self._pods: defaultdict[JobKey, dict[str, RawBody]] = defaultdict(dict)  # by uid
        self._services: defaultdict[JobKey, dict[str, RawBody]] = defaultdict(dict)  # by uid
        self._tombstones: dict[JobKey, tuple[Tombstone, ...]] = {}

    def on_pod_event(self, before: RawBody | None, after: RawBody | None) -> None:
        """Store one change of a pod, as an Informer reports it; a deleted pod leaves a tombstone."""
        if before is not None and after is None and (key := owning_job_key(before)):
            tombstone = Tombstone(pod=before, deleted_at=self._clock())
            self._store_tombstones(key, (*self._tombstones.get(key, ()), tombstone))
        self._update_index(self._pods, before, after)

    def on_service_event(self, before: RawBody | None, after: RawBody | None) -> None:
        """Store one change of a service, as an Informer reports it."""
        self._update_index(self._services, before, after)

    def pods(self, key: JobKey) -> tuple[RawBody, ...]:
        """Return the existing pods of the job, of all attempts."""
        return tuple(self._pods.get(key, {}).values())

    def services(self, key: JobKey) -> tuple[RawBody, ...]:
        """Return the existing services of the job."""
        return tuple(self._services.get(key, {}).values())

    def deleted_pods(self, key: JobKey) -> tuple[RawBody, ...]:
        """Return the last known objects of the job's deleted pods, in the order of their deletion."""
        return tuple(tombstone.pod for tombstone in self._tombstones.get(key, ()))

    def forget(self, key: JobKey) -> None:
        """Drop the tombstones of a deleted job; its remaining pods are removed by their own deletion events."""
        self._tombstones.pop(key, None)

    def prune(self) -> None:
        """Drop expired tombstones, such as those of pods that were deleted after their job."""
        for key, tombstones in list(self._tombstones.items()):
            self._store_tombstones(key, tombstones)

    def _store_tombstones(self, key: JobKey, tombstones: tuple[Tombstone, ...]) -> None:
        retained = prune_tombstones(tombstones, current_attempt=self._current_attempt(key), now=self._clock())
        if retained:
            self._tombstones[key] = retained
        else:
            self._tombstones.pop(key, None)

    def _update_index(
        self, index: defaultdict[JobKey, dict[str, RawBody]], before: RawBody | None, after: RawBody | None
    ) -> None:
        old_key, new_key = (None if body is None else owning_job_key(body) for body in (before, after))
        if before is not None and old_key is not None and old_key != new_key:
            index[old_key].pop(before["metadata"]["uid"], None)
            if not index[old_key]:
                del index[old_key]
        if after is not None and new_key is not None:
            index[new_key][after["metadata"]["uid"]] = after
        for key in {old_key, new_key} - {None}:
            self._on_change(key)  # type: ignore[arg-type]


def owning_job_key(body: RawBody) -> JobKey | None:
    """Return the key of the job that the object's labels name, or None without such a label."""
    metadata = body["metadata"]
    uid = metadata.get("labels", {}).get(names.JOB_UID)
    return JobKey(metadata["namespace"], uid) if uid else None
