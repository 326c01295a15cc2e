"""What a decision asks the shell to do; each is safe to repeat."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Create:
    """Make a child; one that is there already and ours counts as made."""

    manifest: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.manifest['kind']} {self.manifest['metadata']['name']}"


@dataclass(frozen=True)
class DeletePod:
    """Stop a pod; its processes get SIGTERM and this many seconds."""

    name: str
    uid: str
    grace_seconds: int


@dataclass(frozen=True)
class DeleteService:
    """Remove a Service that somebody edited, so that it can be made anew."""

    name: str
    uid: str


@dataclass(frozen=True)
class DeleteConfigMap:
    """Remove the ConfigMap of an attempt that is over."""

    name: str


@dataclass(frozen=True)
class DeleteJob:
    """Remove the job itself (TTL); its children follow by garbage collection."""

    uid: str


@dataclass(frozen=True)
class Emit:
    """Tell a transition once; `key` makes its name, so that a repetition is no second event."""

    type: str  # Normal or Warning
    reason: str
    message: str
    key: str


Action = Create | DeletePod | DeleteService | DeleteConfigMap | DeleteJob | Emit
