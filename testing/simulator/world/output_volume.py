"""The output volume: checkpoints, the lock and the one result. It outlives pods, nodes and operators."""

from dataclasses import dataclass, field


class LockLost(Exception):
    """A newer attempt has the lock."""


@dataclass(frozen=True)
class Publication:
    """Something that was published: a checkpoint's step, or the result."""

    attempt: int
    group: int
    what: str
    time: float


@dataclass
class Folder:
    """One job's folder."""

    holder: int = -1
    step: int = 0
    result: bool = False
    locks: list[int] = field(default_factory=list)
    publications: list[Publication] = field(default_factory=list)

    def take_lock(self, attempt: int) -> None:
        """The trainer's promise: an attempt takes the lock when it begins to train; a newer one's is not taken away."""
        if attempt < self.holder:
            raise LockLost
        self.holder = attempt
        self.locks.append(attempt)

    def save(self, publication: Publication, *, step: int) -> None:
        """A checkpoint, by the holder alone."""
        self._publish(publication)
        self.step = step

    def finish(self, publication: Publication) -> None:
        """The result, by the holder alone."""
        self._publish(publication)
        self.result = True

    def _publish(self, publication: Publication) -> None:
        if publication.attempt != self.holder:
            raise LockLost
        self.publications.append(publication)
