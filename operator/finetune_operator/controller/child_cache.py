"""The pods and services of every job, by job, with the last look at pods that are gone."""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from finetune_operator import names
from finetune_operator.controller.tombstones import Tombstone, keep_tombstones
from finetune_operator.kube.api_client import Raw


class JobKey(NamedTuple):
    """One job, not merely one name: a job made again under its name is another."""

    namespace: str
    uid: str


class Children:
    """What the informers tell, sorted by job; `on_change` hears whose objects changed."""

    def __init__(
        self,
        *,
        on_change: Callable[[JobKey], None],
        present_attempt: Callable[[JobKey], int | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_change = on_change
        self._present_attempt = present_attempt
        self._clock = clock
        self._pods: defaultdict[JobKey, dict[str, Raw]] = defaultdict(dict)
        self._services: defaultdict[JobKey, dict[str, Raw]] = defaultdict(dict)
        self._tombstones: dict[JobKey, tuple[Tombstone, ...]] = {}

    def pod_changed(self, before: Raw | None, after: Raw | None) -> None:
        """Hear of one change of a pod, as an Informer tells it."""
        if before is not None and after is None and (key := owner_key(before)):
            self._bury(key, before)
        self._change(self._pods, before, after)

    def service_changed(self, before: Raw | None, after: Raw | None) -> None:
        """Hear of one change of a service."""
        self._change(self._services, before, after)

    def pods(self, key: JobKey) -> tuple[Raw, ...]:
        """The job's pods, of whatever attempt."""
        return tuple(self._pods.get(key, {}).values())

    def services(self, key: JobKey) -> tuple[Raw, ...]:
        """The job's services."""
        return tuple(self._services.get(key, {}).values())

    def gone(self, key: JobKey) -> tuple[Raw, ...]:
        """Pods that are gone, as they were last seen, in the order they went."""
        return tuple(tombstone.pod for tombstone in self._tombstones.get(key, ()))

    def forget(self, key: JobKey) -> None:
        """The job is gone; what is left of its pods will be told as deletions."""
        self._tombstones.pop(key, None)

    def sweep(self) -> None:
        """Let go of what nobody asks for any more, such as pods that outlived their job."""
        for key, tombstones in list(self._tombstones.items()):
            self._keep(key, tombstones)

    def _bury(self, key: JobKey, pod: Raw) -> None:
        self._keep(key, (*self._tombstones.get(key, ()), Tombstone(pod=pod, time=self._clock())))

    def _keep(self, key: JobKey, tombstones: tuple[Tombstone, ...]) -> None:
        kept = keep_tombstones(tombstones, present_attempt=self._present_attempt(key), now=self._clock())
        if kept:
            self._tombstones[key] = kept
        else:
            self._tombstones.pop(key, None)

    def _change(self, index: defaultdict[JobKey, dict[str, Raw]], before: Raw | None, after: Raw | None) -> None:
        old_key, new_key = (None if body is None else owner_key(body) for body in (before, after))
        if before is not None and old_key is not None and old_key != new_key:
            index[old_key].pop(before["metadata"]["uid"], None)
            if not index[old_key]:
                del index[old_key]
        if after is not None and new_key is not None:
            index[new_key][after["metadata"]["uid"]] = after
        for key in {old_key, new_key} - {None}:
            self._on_change(key)  # type: ignore[arg-type]


def owner_key(body: Raw) -> JobKey | None:
    """The job that an object says it belongs to."""
    metadata = body["metadata"]
    uid = metadata.get("labels", {}).get(names.JOB_UID)
    return JobKey(metadata["namespace"], uid) if uid else None
