"""The parts of a fault: the job it is injected into, the time and the injection; and the jobs most faults use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from testing.builders.jobs import command
from testing.cluster.images.project_images import image_name
from testing.faults.job_under_test import JobUnderTest, RawBody
from testing.processes.cluster_training import training

Injection = Callable[[JobUnderTest], AbstractContextManager[None]]
POD_FOLDER = "/data/chaos"  # where pods mount the training program


class InjectionTime(Enum):
    """The point in the job's life at which the fault is injected."""

    BEFORE = auto()  # before the job is created
    STARTING = auto()  # as soon as its first attempt exists
    TRAINING = auto()  # once it has trained `at_step` steps
    BY_ITSELF = auto()  # the program injects the fault itself


@contextmanager
def no_injection(_job: JobUnderTest) -> Iterator[None]:
    """Inject nothing, because the program or the spec is the fault."""
    yield


@dataclass(frozen=True)
class InjectedFault:
    """A fault of the matrix, and the spec of the job it is injected into.

    The context `inject` creates the fault when entered and removes it when left: after `duration_seconds`, or when
    the job trains again. `fields` returns the fields of the spec that differ from the example. `is_isolated`: other
    jobs are not affected, so that several such faults can be injected at the same time.
    """

    fields: Callable[[JobUnderTest], RawBody]
    inject: Injection = no_injection
    injection_time: InjectionTime = InjectionTime.TRAINING
    at_step: int = 15
    duration_seconds: float | None = None
    recovery_timeout_seconds: float = 200
    is_isolated: bool = False


def program_fields(*arguments: str, ranks: int = 1, **fields: Any) -> RawBody:
    """Return the fields of a job that runs training_program.py: as a script if a node has several ranks."""
    if ranks == 1:
        run: RawBody = {"exec": ["python3", f"{POD_FOLDER}/program.py", *arguments]}
        image = image_name("operator")  # the smallest image with Python
    else:
        run = {"script": "program.py", "args": list(arguments), "workingDir": POD_FOLDER}
        image = image_name("trainer")
    return command(run, **{"image": image, "nprocPerNode": ranks, **fields})


def runs_program(*arguments: str, ranks: int = 1, **fields: Any) -> Callable[[JobUnderTest], RawBody]:
    """Return a function that returns the same fields for every job."""
    return lambda _job: program_fields(*arguments, ranks=ranks, **fields)


def program_fault(fault: str, *arguments: str, ranks: int = 1, **fields: Any) -> InjectedFault:
    """Return a fault that the program injects itself, in its last rank and, by default, its first attempt only."""
    return InjectedFault(
        runs_program("--fault", fault, "--rank", str(2 * ranks - 1), *arguments, ranks=ranks, **fields),
        injection_time=InjectionTime.BY_ITSELF,
        is_isolated=True,
    )


def trainer_fields(**fields: Any) -> RawBody:
    """Return the fields of a job that runs the operator's trainer on 2 nodes x 2 ranks, long enough to recover."""
    return {"training": training(max_steps=90, save_steps=20), **fields}
