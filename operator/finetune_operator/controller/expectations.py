"""Remembers the pods that this process created or deleted until the watch delivers the events."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from finetune_operator.controller.child_cache import JobKey
from finetune_operator.core.actions import Action, Create, DeletePod

EXPECTATION_TIMEOUT_SECONDS = 5.0  # then the request is repeated after a LIST, in case its effect was lost


class Expectations:
    """Creates and deletions whose events have not necessarily arrived, as in Kubernetes' own controllers.

    Without them, a pass between a request and its event lists the pods, or deletes a pod, once more (decisions/130).
    """

    def __init__(self, *, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or time.monotonic  # no default argument, because the simulator replaces the function
        # time of the request by kind and name of the child
        self._created: defaultdict[JobKey, dict[tuple[str, str], float]] = defaultdict(dict)
        # uid by name of the pods of the newest attempt that this process created, also after the timeout
        self._created_pods: dict[JobKey, dict[str, str]] = {}
        # time of the request and grace period in seconds by uid of the pod
        self._deleted: defaultdict[JobKey, dict[str, tuple[float, int]]] = defaultdict(dict)

    def record(self, key: JobKey, actions: Iterable[Action], pod_uids: Mapping[str, str]) -> bool:
        """Record the executed actions of a pass and return whether an event is expected.

        pod_uids: uids of the created pods by name.
        """
        self._drop_expired(key)
        for action in actions:
            match action:
                case Create(manifest):
                    child = manifest["kind"], manifest["metadata"]["name"]
                    self._created[key][child] = self._clock()
                case DeletePod(_, uid, grace_seconds):
                    self._deleted[key][uid] = self._clock(), grace_seconds
        if pod_uids:
            self._remember_pods(key, pod_uids)
        return key in self._created or key in self._deleted

    def list_created(self, key: JobKey, kind: str) -> frozenset[str]:
        """Return the names of the children of this kind that this process created within the timeout."""
        self._drop_expired(key)
        return frozenset(name for child_kind, name in self._created.get(key, ()) if child_kind == kind)

    def list_created_pods(self, key: JobKey) -> Mapping[str, str]:
        """Return the uids of all pods of the newest attempt that this process created, by name."""
        return self._created_pods.get(key, {})

    def list_deletions(self, key: JobKey) -> Mapping[str, int]:
        """Return the grace period in seconds of the pods that this process deleted within the timeout, by uid."""
        self._drop_expired(key)
        return {uid: grace_seconds for uid, (_, grace_seconds) in self._deleted.get(key, {}).items()}

    def forget_created_pods(self, key: JobKey) -> None:
        """Drop the created pods of a job that has finished."""
        self._created_pods.pop(key, None)

    def forget(self, key: JobKey) -> None:
        """Drop the expectations of a deleted job."""
        self.forget_created_pods(key)
        self._created.pop(key, None)
        self._deleted.pop(key, None)

    def _remember_pods(self, key: JobKey, pod_uids: Mapping[str, str]) -> None:
        """Add the created pods of one attempt, and drop those of older attempts."""
        prefix = next(iter(pod_uids)).rpartition("-")[0]  # name of the job and number of the attempt
        known = self.list_created_pods(key).items()
        same_attempt = {name: uid for name, uid in known if name.rpartition("-")[0] == prefix}
        self._created_pods[key] = {**same_attempt, **pod_uids}

    def _drop_expired(self, key: JobKey) -> None:
        oldest = self._clock() - EXPECTATION_TIMEOUT_SECONDS
        created = {child: sent_at for child, sent_at in self._created.pop(key, {}).items() if sent_at > oldest}
        deleted = {uid: sent for uid, sent in self._deleted.pop(key, {}).items() if sent[0] > oldest}
        if created:
            self._created[key] = created
        if deleted:
            self._deleted[key] = deleted
