"""Cache of the newest body of every job; its sources are kopf's watch, the resync LIST and own status writes."""

import json
from collections import Counter, OrderedDict
from collections.abc import Iterator, Set
from dataclasses import dataclass

from finetune_operator import names
from finetune_operator.controller.child_cache import JobKey
from finetune_operator.kube.resource_versions import StateRolledBack, is_later_version
from finetune_operator.observation.ownership import JobOwner, RawBody, get_start_key, is_controlled
from finetune_operator.observation.pod_identity import PodIdentities, read_pod_identities
from finetune_operator.observation.projection import project_job

MAX_PARSED_JOBS = 128  # bodies that are kept as Python objects, about 30 KiB each


@dataclass(frozen=True, slots=True)
class CachedJob:
    """Body of a job as JSON, which needs a fifth of the memory of the parsed body, and fields that are read often."""

    content: bytes
    name: str
    version: str
    attempt: int | None
    pods: PodIdentities | None  # of the current attempt; None before the first one
    phase: str
    completion_time: str  # as in the status; empty if the job has not finished

    @property
    def is_finished(self) -> bool:
        return bool(self.completion_time)


class JobCache:
    """Cache of job bodies by key; an older body never replaces a newer one."""

    def __init__(self) -> None:
        self._jobs: dict[JobKey, CachedJob] = {}
        self._parsed: OrderedDict[JobKey, RawBody] = OrderedDict()  # of the jobs with the latest passes, latest last

    def __contains__(self, key: JobKey) -> bool:
        return key in self._jobs

    def __iter__(self) -> Iterator[JobKey]:
        return iter(tuple(self._jobs))

    def __len__(self) -> int:
        return len(self._jobs)

    def get(self, key: JobKey) -> RawBody | None:
        """Return the newest known body of the job, without labels and annotations; callers must not modify it."""
        cached = self._jobs.get(key)
        if cached is None:
            return None
        if key not in self._parsed:
            self._parsed[key] = json.loads(cached.content)
            if len(self._parsed) > MAX_PARSED_JOBS:
                self._parsed.popitem(last=False)
        self._parsed.move_to_end(key)
        return self._parsed[key]

    def read(self, key: JobKey) -> RawBody:
        """Return a copy of the body of a known job, which is not kept as a Python object."""
        body: RawBody = json.loads(self._jobs[key].content)
        return body

    def get_identity(self, key: JobKey) -> JobOwner:
        """Return what the owner references of the children of a known job name."""
        return JobOwner(self._jobs[key].name, key.uid)

    def get_version(self, key: JobKey) -> str:
        """Return the resourceVersion of a known job."""
        return self._jobs[key].version

    def get_completion_order(self, key: JobKey) -> tuple[bool, str, JobKey]:
        """Return a sort key by which a job that has not finished, or finished later, is greater."""
        completion_time = self._jobs[key].completion_time
        return not completion_time, completion_time, key

    def store_if_newer(self, body: RawBody) -> bool:
        """Store the body if it is newer than the cached one, and return whether it was stored.

        The watch delivers the operator's own status writes a second time; these are not newer.
        """
        key, version = get_job_key(body), body["metadata"]["resourceVersion"]
        cached = self._jobs.get(key)
        if cached is not None and (version == cached.version or is_later_version(cached.version, version)):
            return False
        self._jobs[key] = _pack(body)
        self._parsed.pop(key, None)
        return True

    def remove(self, key: JobKey) -> None:
        """Remove a job that was deleted."""
        self._jobs.pop(key, None)
        self._parsed.pop(key, None)

    def find_missing_jobs(self, listed_keys: Set[JobKey], *, list_version: str) -> tuple[JobKey, ...]:
        """Return the cached jobs that a LIST does not contain, except those that are newer than the LIST."""
        return tuple(
            key
            for key, cached in self._jobs.items()
            if key not in listed_keys and not is_later_version(cached.version, list_version)
        )

    def newest_version(self) -> str:
        """Return the latest resourceVersion of all cached jobs; an empty string if none is a number."""
        versions = (cached.version for cached in self._jobs.values() if cached.version.isdecimal())
        return max(versions, key=int, default="")

    def check_listed_version(self, body: RawBody, *, list_version: str) -> None:
        """Check that a LIST contains no older body of a job than one that the cache had before that LIST.

        Raises: StateRolledBack
        """
        cached, version = self._jobs.get(get_job_key(body)), body["metadata"]["resourceVersion"]
        if cached is None or is_later_version(cached.version, list_version):  # stored after the LIST
            return
        if is_later_version(cached.version, version):
            raise StateRolledBack(get_namespaced_name(body), known_version=cached.version, current_version=version)

    def current_attempt(self, key: JobKey) -> int | None:
        """Return the number of the current attempt, or None if the job is unknown or has no attempt."""
        cached = self._jobs.get(key)
        return None if cached is None else cached.attempt

    def is_current_pod(self, key: JobKey, pod: RawBody) -> bool:
        """Return whether the operator created the pod for the current attempt of the job."""
        cached = self._jobs.get(key)
        if cached is None or not is_controlled(pod, JobOwner(cached.name, key.uid)):
            return False
        metadata = pod["metadata"]
        attempt, node_rank = names.parse_pod_name(metadata["name"], cached.name) or (None, 0)
        if attempt is None or attempt != cached.attempt:
            return False
        return cached.pods is None or cached.pods.include(node_rank, metadata["uid"], get_start_key(pod))

    def is_finished(self, key: JobKey) -> bool:
        """Return whether the job has a completion time, so that its pods are only counted and deleted."""
        cached = self._jobs.get(key)
        return cached is not None and cached.is_finished

    def count_phases(self) -> Counter[str]:
        """Return the number of jobs in each phase."""
        return Counter(cached.phase for cached in self._jobs.values())


def _pack(body: RawBody) -> CachedJob:
    status = body.get("status") or {}
    attempt = status.get("attempt")
    return CachedJob(
        content=json.dumps(project_job(body), separators=(",", ":"), ensure_ascii=False).encode(errors="surrogatepass"),
        name=body["metadata"]["name"],
        version=body["metadata"]["resourceVersion"],
        attempt=attempt if isinstance(attempt, int) else None,
        pods=read_pod_identities(body),
        phase=status.get("phase", "Queued"),
        completion_time=str(status.get("completionTime") or ""),
    )


def get_job_key(body: RawBody) -> JobKey:
    """Return the namespace and uid of a job."""
    return JobKey(body["metadata"]["namespace"], body["metadata"]["uid"])


def get_namespaced_name(body: RawBody) -> str:
    """Return `namespace/name` of an object for log messages."""
    return f"{body['metadata']['namespace']}/{body['metadata']['name']}"
