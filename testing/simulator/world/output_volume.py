"""The output volume: checkpoints, the lock and the result. It persists when pods, nodes and operators end."""

from dataclasses import dataclass, field


class LockLost(Exception):
    """Raised when a newer attempt has taken the lock."""


@dataclass(frozen=True)
class Publication:
    """Something published in the output folder: the checkpoint of a step, or the result."""

    attempt: int
    group: int
    content: str
    time: float


@dataclass
class SimulatedOutputFolder:
    """The output folder of one job."""

    holder: int = -1
    step: int = 0
    result: bool = False
    locks: list[int] = field(default_factory=list)
    publications: list[Publication] = field(default_factory=list)

    def take_lock(self, attempt: int) -> None:
        """Take the lock when the attempt begins to train, as the trainer does, unless a newer attempt holds it."""
        if attempt < self.holder:
            raise LockLost
        self.holder = attempt
        self.locks.append(attempt)

    def save(self, publication: Publication, *, step: int) -> None:
        """Publish a checkpoint; only the holder of the lock may."""
        self._publish(publication)
        self.step = step

    def finish(self, publication: Publication) -> None:
        """Publish the result; only the holder of the lock may."""
        self._publish(publication)
        self.result = True

    def _publish(self, publication: Publication) -> None:
        if publication.attempt != self.holder:
            raise LockLost
        self.publications.append(publication)
