"""Cache of the newest body of every job; its sources are kopf's watch, the resync LIST and own status writes."""

from collections import Counter
from collections.abc import Iterable, Iterator

from finetune_operator.controller.child_cache import JobKey
from finetune_operator.observation.ownership import RawBody


class JobCache:
    """Cache of job bodies by key; an older body never replaces a newer one."""

    def __init__(self) -> None:
        self._bodies: dict[JobKey, RawBody] = {}

    def __contains__(self, key: JobKey) -> bool:
        return key in self._bodies

    def __iter__(self) -> Iterator[JobKey]:
        return iter(tuple(self._bodies))

    def __len__(self) -> int:
        return len(self._bodies)

    def get(self, key: JobKey) -> RawBody | None:
        """Return the newest known body of the job."""
        return self._bodies.get(key)

    def store_if_newer(self, body: RawBody) -> bool:
        """Store the body if it is newer than the cached one, and return whether it was stored.

        The watch delivers the operator's own status writes a second time; these are not newer.
        """
        key = get_job_key(body)
        cached = self._bodies.get(key)
        if cached is not None and not _is_newer(body, cached):
            return False
        metadata = {name: value for name, value in body["metadata"].items() if name != "managedFields"}
        self._bodies[key] = {**body, "metadata": metadata}
        return True

    def remove(self, key: JobKey) -> None:
        """Remove a job that was deleted."""
        self._bodies.pop(key, None)

    def find_missing_jobs(self, listed_jobs: Iterable[RawBody], *, list_version: str) -> tuple[JobKey, ...]:
        """Return the cached jobs that a LIST does not contain, except those that are newer than the LIST."""
        listed_keys = {get_job_key(body) for body in listed_jobs}
        return tuple(
            key
            for key, body in self._bodies.items()
            if key not in listed_keys and not _is_later_version(body["metadata"]["resourceVersion"], list_version)
        )

    def current_attempt(self, key: JobKey) -> int | None:
        """Return the number of the current attempt, or None if the job is unknown or has no attempt."""
        attempt = self._bodies.get(key, {}).get("status", {}).get("attempt")
        return attempt if isinstance(attempt, int) else None

    def count_phases(self) -> Counter[str]:
        """Return the number of jobs in each phase."""
        return Counter(body.get("status", {}).get("phase", "Queued") for body in self._bodies.values())


def get_job_key(body: RawBody) -> JobKey:
    """Return the namespace and uid of a job."""
    return JobKey(body["metadata"]["namespace"], body["metadata"]["uid"])


def get_namespaced_name(body: RawBody) -> str:
    """Return `namespace/name` of an object for log messages."""
    return f"{body['metadata']['namespace']}/{body['metadata']['name']}"


def _is_newer(body: RawBody, cached: RawBody) -> bool:
    version, cached_version = body["metadata"]["resourceVersion"], cached["metadata"]["resourceVersion"]
    return version != cached_version and not _is_later_version(cached_version, version)


def _is_later_version(version: str, other_version: str) -> bool:
    """Return whether `version` is later than `other_version`; False if either is not a number.

    Kubernetes documents since 1.35 that resource versions can be compared as numbers.
    """
    return version.isdecimal() and other_version.isdecimal() and int(version) > int(other_version)
