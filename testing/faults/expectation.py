"""What an expectation says: how a fault is made, and all that must come of it."""

from __future__ import annotations

from dataclasses import dataclass

from finetune_api.v1alpha1.reasons import FailureAction, Reason
from finetune_api.v1alpha1.status import Fault, Phase
from finetune_operator.failures.restart_budget import UNCOUNTED


@dataclass(frozen=True)
class Failure:
    """One attempt that ended badly: why, and what follows. Whose fault it is follows from the reason."""

    reason: Reason
    action: FailureAction

    @property
    def fault(self) -> Fault:
        assert self.reason.fault is not None
        return self.reason.fault

    @property
    def is_counted(self) -> bool:
        """Whether it spends the job's own restarts."""
        return self.action is FailureAction.RESTART and self.fault not in UNCOUNTED


@dataclass(frozen=True)
class Expectation:
    """How a fault is made, and all that must be seen of it. Every failed attempt is named; none is none.

    `node_rank` and `rank` are those blamed for the first failure, where one stands out. `avoids`: the last attempt
    keeps away from a machine.
    """

    name: str
    injected: str
    failures: tuple[Failure, ...] = ()
    waits_for: Reason | None = None
    node_rank: int | None = None
    rank: int | None = None
    steps_lost: int | None = None
    avoids: bool = False

    @property
    def phase(self) -> Phase:
        """Where the job must end."""
        failed = bool(self.failures) and self.failures[-1].action is FailureAction.FAIL
        return Phase.FAILED if failed else Phase.COMPLETE

    @property
    def restarts(self) -> int:
        return sum(failure.action is not FailureAction.FAIL for failure in self.failures)

    @property
    def counted(self) -> int:
        """Restarts that the budget must show at the end."""
        return sum(failure.is_counted for failure in self.failures)


def restarted(reason: Reason) -> tuple[Failure, ...]:
    return (Failure(reason, FailureAction.RESTART),)


def repaired(reason: Reason) -> tuple[Failure, ...]:
    return (Failure(reason, FailureAction.REPAIR),)


def failed(reason: Reason) -> tuple[Failure, ...]:
    return (Failure(reason, FailureAction.FAIL),)
