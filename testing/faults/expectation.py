"""The expected course of a job after a fault."""

from __future__ import annotations

from dataclasses import dataclass

from finetune_api.v1alpha1.reasons import FailureAction, Reason
from finetune_api.v1alpha1.status import Fault, Phase
from finetune_operator.failures.restart_budget import INFRASTRUCTURE_FAULTS


@dataclass(frozen=True)
class Failure:
    """An expected failed attempt: its reason and what follows; the fault follows from the reason."""

    reason: Reason
    action: FailureAction

    @property
    def fault(self) -> Fault:
        assert self.reason.fault is not None
        return self.reason.fault

    @property
    def is_counted(self) -> bool:
        """Whether the restart counts against the job's own restart budget."""
        return self.action is FailureAction.RESTART and self.fault not in INFRASTRUCTURE_FAULTS


@dataclass(frozen=True)
class Expectation:
    """How a fault is injected, and everything that is expected of the job afterwards.

    `failures` lists all failed attempts. `node_rank` and `rank` are to blame for the first failure, if a single one
    is the root cause. `avoids`: the last attempt avoids a Kubernetes node.
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
        """The phase in which the job must end."""
        failed = bool(self.failures) and self.failures[-1].action is FailureAction.FAIL
        return Phase.FAILED if failed else Phase.COMPLETE

    @property
    def restarts(self) -> int:
        return sum(failure.action is not FailureAction.FAIL for failure in self.failures)

    @property
    def counted(self) -> int:
        """Restarts that must count against the budget at the end."""
        return sum(failure.is_counted for failure in self.failures)


def restarted(reason: Reason) -> tuple[Failure, ...]:
    return (Failure(reason, FailureAction.RESTART),)


def repaired(reason: Reason) -> tuple[Failure, ...]:
    return (Failure(reason, FailureAction.REPAIR),)


def failed(reason: Reason) -> tuple[Failure, ...]:
    return (Failure(reason, FailureAction.FAIL),)
