"""Expected result of a job after a fault."""

from __future__ import annotations

from dataclasses import dataclass

from finetune_api.v1alpha1.reasons import FailureAction, Reason
from finetune_api.v1alpha1.status import Fault, Phase
from finetune_operator.failures.restart_budget import INFRASTRUCTURE_FAULTS

SAVE_STEPS = 10  # steps between saves of training_program.py, which also saves on SIGTERM
TRAINER_SAVE_STEPS = 20  # steps between saves of finetune_trainer
STEPS_LOST_AFTER_SAVE = 1  # maximum number of lost steps if the program saved before it stopped


@dataclass(frozen=True)
class ExpectedFailure:
    """An expected failed attempt, with its reason and the action that follows."""

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
class ExpectedValue:
    """A value that the injection measures in addition to the result of the job.

    equal_to: the expected value; None if the value only has an upper bound.
    """

    name: str
    equal_to: str | int | None = None
    at_most: float | None = None

    def is_met_by(self, value: str | float) -> bool:
        if self.at_most is not None:
            return isinstance(value, int | float) and value <= self.at_most
        return value == self.equal_to

    def __str__(self) -> str:
        return f"{self.name}: {self.equal_to if self.at_most is None else f'at most {self.at_most:g}'}"


OPERATOR_RESTARTS = "operator restarts"  # of all containers of the operator; counted after each run
NO_OPERATOR_RESTARTS = ExpectedValue(OPERATOR_RESTARTS, equal_to=0)


@dataclass(frozen=True)
class Expectation:
    """Describes a fault and the expected result of its job.

    failures: all expected failed attempts, in order.
    node_rank, rank: node and rank that cause the first failure, if it has a single cause.
    avoids_node: whether the last attempt avoids a Kubernetes node.
    values: further values that the injection measures, for example about another job.
    """

    name: str
    description: str
    failures: tuple[ExpectedFailure, ...] = ()
    pending_reason: Reason | None = None
    node_rank: int | None = None
    rank: int | None = None
    max_steps_lost: int | None = None
    avoids_node: bool = False
    values: tuple[ExpectedValue, ...] = ()

    @property
    def phase(self) -> Phase:
        """Expected final phase of the job."""
        has_failed = bool(self.failures) and self.failures[-1].action is FailureAction.FAIL
        return Phase.FAILED if has_failed else Phase.COMPLETE

    @property
    def restarts(self) -> int:
        return sum(failure.action is not FailureAction.FAIL for failure in self.failures)

    @property
    def counted_restarts(self) -> int:
        """Expected number of restarts that count against the budget."""
        return sum(failure.is_counted for failure in self.failures)


def expect_restart(reason: Reason) -> tuple[ExpectedFailure, ...]:
    return (ExpectedFailure(reason, FailureAction.RESTART),)


def expect_repair(reason: Reason) -> tuple[ExpectedFailure, ...]:
    return (ExpectedFailure(reason, FailureAction.REPAIR),)


def expect_failure(reason: Reason) -> tuple[ExpectedFailure, ...]:
    return (ExpectedFailure(reason, FailureAction.FAIL),)


def expect_no_failure(
    name: str,
    description: str,
    *,
    pending_reason: Reason | None = None,
    max_steps_lost: int | None = 0,
    values: tuple[ExpectedValue, ...] = (),
) -> Expectation:
    """Expect that no attempt fails and, by default, that no step is lost."""
    return Expectation(name, description, pending_reason=pending_reason, max_steps_lost=max_steps_lost, values=values)


def expect_one_restart(
    name: str,
    description: str,
    reason: Reason = Reason.CONTAINER_KILLED,
    *,
    max_steps_lost: int | None = SAVE_STEPS,
    rank: int | None = None,
    pending_reason: Reason | None = None,
    avoids_node: bool = False,
    values: tuple[ExpectedValue, ...] = (),
) -> Expectation:
    """Expect one restart that node 1 causes, by default because its PID 1 is killed during or after the fault."""
    return Expectation(
        name,
        description,
        expect_restart(reason),
        pending_reason=pending_reason,
        node_rank=1,
        rank=rank,
        max_steps_lost=max_steps_lost,
        avoids_node=avoids_node,
        values=values,
    )
