"""Simulated output volume with checkpoints, lock and result, which does not depend on pods or nodes."""

from dataclasses import dataclass, field


class LockLost(Exception):
    """Raised when a newer attempt has taken the lock."""


@dataclass(frozen=True)
class Publication:
    """A published checkpoint or result in the output folder."""

    attempt: int
    group: int
    content: str
    time: float


@dataclass
class SimulatedOutputFolder:
    """The output folder of one job."""

    lock_holder: int = -1
    step: int = 0
    has_result: bool = False
    locks: list[int] = field(default_factory=list)
    publications: list[Publication] = field(default_factory=list)

    def take_lock(self, attempt: int) -> None:
        """Take the lock for an attempt, as the trainer does before training, unless a newer attempt holds it."""
        if attempt < self.lock_holder:
            raise LockLost
        self.lock_holder = attempt
        self.locks.append(attempt)

    def save(self, publication: Publication, *, step: int) -> None:
        """Publish a checkpoint.

        Raises: LockLost
        """
        self._publish(publication)
        self.step = step

    def finish(self, publication: Publication) -> None:
        """Publish the result.

        Raises: LockLost
        """
        self._publish(publication)
        self.has_result = True

    def _publish(self, publication: Publication) -> None:
        if publication.attempt != self.lock_holder:
            raise LockLost
        self.publications.append(publication)
