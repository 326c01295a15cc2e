"""Definition of a fault, including its injection and the spec of its job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from testing.faults.job_under_test import JobUnderTest, RawBody
from testing.faults.training_job import build_program_fields
from testing.processes.cluster_training import build_training_fields

Injection = Callable[[JobUnderTest], AbstractContextManager[None]]


class InjectionTime(Enum):
    """Time at which a fault is injected, relative to the lifecycle of the job."""

    BEFORE_CREATION = auto()
    STARTING = auto()  # as soon as the first attempt exists
    TRAINING = auto()  # after `injection_step` training steps
    BY_PROGRAM = auto()  # the training program injects the fault


@contextmanager
def inject_nothing(_job: JobUnderTest) -> Iterator[None]:
    """Inject nothing, because the program or the spec already contains the fault."""
    yield


def make_program_fields(*arguments: str, ranks: int = 1, **fields: Any) -> Callable[[JobUnderTest], RawBody]:
    """Return a function that builds the same program fields for every job."""
    return lambda _job: build_program_fields(*arguments, ranks=ranks, **fields)


def build_default_fields(_job: JobUnderTest) -> RawBody:
    """Return the spec fields of a job that runs training_program.py without arguments."""
    return build_program_fields()


@dataclass(frozen=True)
class InjectedFault:
    """A fault of the matrix and the spec of the job into which it is injected.

    inject: context manager that creates the fault on entry and removes it on exit. It exits after `duration_seconds`
        or when the job trains again.
    build_spec_fields: returns the spec fields that differ from the example job, by default those of a program.
    prepare: context manager that is entered before the job is created and exited after its deletion.
    is_isolated: the fault does not affect other jobs, so several such faults can be injected at the same time.
    """

    inject: Injection = inject_nothing
    build_spec_fields: Callable[[JobUnderTest], RawBody] = build_default_fields
    injection_time: InjectionTime = InjectionTime.TRAINING
    injection_step: int = 15
    duration_seconds: float | None = None
    recovery_timeout_seconds: float = 200
    is_isolated: bool = False
    prepare: Injection = inject_nothing


def build_start_fault(
    inject: Injection = inject_nothing,
    build_spec_fields: Callable[[JobUnderTest], RawBody] = build_default_fields,
    *,
    duration_seconds: float | None = None,
    recovery_timeout_seconds: float = 200,
    is_isolated: bool = False,
) -> InjectedFault:
    """Return a fault that exists before the job is created."""
    return InjectedFault(
        inject,
        build_spec_fields,
        InjectionTime.BEFORE_CREATION,
        duration_seconds=duration_seconds,
        recovery_timeout_seconds=recovery_timeout_seconds,
        is_isolated=is_isolated,
    )


def build_program_fault(fault: str, *arguments: str, ranks: int = 1, **fields: Any) -> InjectedFault:
    """Return a fault that the training program injects in its last rank and, by default, only in the first attempt."""
    return InjectedFault(
        inject_nothing,
        make_program_fields("--fault", fault, "--rank", str(2 * ranks - 1), *arguments, ranks=ranks, **fields),
        injection_time=InjectionTime.BY_PROGRAM,
        is_isolated=True,
    )


def build_trainer_fields(**fields: Any) -> RawBody:
    """Return the spec fields of a fine-tuning job with 2 nodes x 2 ranks that runs long enough to recover."""
    return {"training": build_training_fields(max_steps=90, save_steps=20), **fields}
