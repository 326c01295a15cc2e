"""What a fault is made of: the job it strikes, the moment, and the deed; and the jobs that most faults strike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from testing.builders.jobs import command
from testing.cluster.images.project_images import image_name
from testing.faults.job_under_test import Raw, Scene
from testing.processes.cluster_training import training

Strike = Callable[[Scene], AbstractContextManager[None]]
FOLDER = "/data/chaos"  # where pods see this package


class When(Enum):
    """At which point of the job's life it is struck."""

    BEFORE = auto()  # it is applied
    STARTING = auto()  # as soon as its first attempt is begun
    TRAINING = auto()  # it has come to `at_step`
    BY_ITSELF = auto()  # the program says when


@contextmanager
def nothing(_scene: Scene) -> Iterator[None]:
    """The program or the spec is fault enough."""
    yield


@dataclass(frozen=True)
class Fault:
    """`strike` is entered to make the fault and left to undo it: after `lasts_seconds`, or when the job trains again.

    `fields` are those of the spec that differ from the example's. `spares_others`: jobs beside it are not touched.
    """

    fields: Callable[[Scene], Raw]
    strike: Strike = nothing
    when: When = When.TRAINING
    at_step: int = 15
    lasts_seconds: float | None = None
    patience_seconds: float = 200
    spares_others: bool = False


def program(*words: str, ranks: int = 1, **fields: Any) -> Raw:
    """Fields of a job that runs `program.py`: as a script where a node has more than one rank."""
    if ranks == 1:
        run: Raw = {"exec": ["python3", f"{FOLDER}/program.py", *words]}
        image = image_name("operator")  # has a Python and nothing else that matters here
    else:
        run = {"script": "program.py", "args": list(words), "workingDir": FOLDER}
        image = image_name("trainer")
    return command(run, **{"image": image, "nprocPerNode": ranks, **fields})


def does(*words: str, ranks: int = 1, **fields: Any) -> Callable[[Scene], Raw]:
    """The same for every scene."""
    return lambda _scene: program(*words, ranks=ranks, **fields)


def does_wrong(what: str, *words: str, ranks: int = 1, **fields: Any) -> Fault:
    """The program itself does something wrong: in the last rank, by default in its first attempt only."""
    return Fault(
        does("--fault", what, "--rank", str(2 * ranks - 1), *words, ranks=ranks, **fields),
        when=When.BY_ITSELF,
        spares_others=True,
    )


def trainer(**fields: Any) -> Raw:
    """Fields of a job of the operator's own trainer: 2 nodes x 2 ranks, long enough to be broken and to recover."""
    return {"training": training(max_steps=90, save_steps=20), **fields}
