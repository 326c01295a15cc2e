"""Actions of a decision, which are cluster changes that are safe to repeat."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Create:
    """Create a child; succeeds if this job already owns an object of that name."""

    manifest: dict[str, Any]

    @property
    def name(self) -> str:
        """Kind and name of the child, such as `Pod bert-0-1`."""
        return f"{self.manifest['kind']} {self.manifest['metadata']['name']}"


@dataclass(frozen=True)
class DeletePod:
    """Delete a pod; its processes receive SIGTERM, and SIGKILL after `grace_seconds`."""

    name: str
    uid: str
    grace_seconds: int


@dataclass(frozen=True)
class DeleteService:
    """Delete a Service whose spec a user edited, so that the next pass creates it again."""

    name: str
    uid: str


@dataclass(frozen=True)
class DeleteConfigMap:
    """Delete the ConfigMap of an earlier attempt."""

    name: str


@dataclass(frozen=True)
class DeleteWorkload:
    """Delete the Workload of Kueue, which then returns the quota and removes its finalizer from the pods."""

    name: str


@dataclass(frozen=True)
class DeletePodGroup:
    """Delete the PodGroup of an earlier attempt."""

    name: str
    api_version: str


@dataclass(frozen=True)
class DeleteJob:
    """Delete the job itself after its TTL; the garbage collector deletes its children."""

    uid: str


@dataclass(frozen=True)
class EmitEvent:
    """Create an event about a transition; its name is derived from `key`, so that it is created only once."""

    type: str  # Normal or Warning
    reason: str
    message: str
    key: str


Action = Create | DeletePod | DeleteService | DeleteConfigMap | DeleteWorkload | DeletePodGroup | DeleteJob | EmitEvent
