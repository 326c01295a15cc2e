"""The newest body known of every job, whoever brought it: kopf's watch, our own LIST, or our own status write."""

from collections import Counter
from collections.abc import Iterable, Iterator

from finetune_operator.controller.child_cache import JobKey
from finetune_operator.kube.api_client import Raw


class Jobs:
    """Jobs by key. An older body never replaces a newer one."""

    def __init__(self) -> None:
        self._bodies: dict[JobKey, Raw] = {}

    def __contains__(self, key: JobKey) -> bool:
        return key in self._bodies

    def __iter__(self) -> Iterator[JobKey]:
        return iter(tuple(self._bodies))

    def __len__(self) -> int:
        return len(self._bodies)

    def get(self, key: JobKey) -> Raw | None:
        """The newest body known."""
        return self._bodies.get(key)

    def offer(self, body: Raw) -> bool:
        """Take a body if it is news; our own write comes back from the watch and is none."""
        key = job_key(body)
        known = self._bodies.get(key)
        if known is not None and not _is_newer(body, known):
            return False
        metadata = {name: value for name, value in body["metadata"].items() if name != "managedFields"}
        self._bodies[key] = {**body, "metadata": metadata}
        return True

    def drop(self, key: JobKey) -> None:
        """The job is gone."""
        self._bodies.pop(key, None)

    def missing_from(self, listed: Iterable[Raw], *, list_version: str) -> tuple[JobKey, ...]:
        """Jobs we believe in that a LIST does not have; one that is younger than the LIST is none of them."""
        present = {job_key(body) for body in listed}
        return tuple(
            key
            for key, body in self._bodies.items()
            if key not in present and not _follows(body["metadata"]["resourceVersion"], list_version)
        )

    def attempt(self, key: JobKey) -> int | None:
        """The job's present attempt, if the job is known and has one."""
        attempt = self._bodies.get(key, {}).get("status", {}).get("attempt")
        return attempt if isinstance(attempt, int) else None

    def count_phases(self) -> Counter[str]:
        """How many jobs are in which phase."""
        return Counter(body.get("status", {}).get("phase", "Queued") for body in self._bodies.values())


def job_key(body: Raw) -> JobKey:
    """The job's identity."""
    return JobKey(body["metadata"]["namespace"], body["metadata"]["uid"])


def job_label(body: Raw) -> str:
    """The job as people call it, for logs."""
    return f"{body['metadata']['namespace']}/{body['metadata']['name']}"


def _is_newer(body: Raw, known: Raw) -> bool:
    version, known_version = body["metadata"]["resourceVersion"], known["metadata"]["resourceVersion"]
    return version != known_version and not _follows(known_version, version)


def _follows(version: str, other: str) -> bool:
    """Numbers are compared, as Kubernetes documents since 1.35; of anything else the last delivered counts."""
    return version.isdecimal() and other.isdecimal() and int(version) > int(other)
