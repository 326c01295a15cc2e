"""Scripts of a soak test: the acts performed on each job and its expected end. Pure functions."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

RawBody = dict[str, Any]

MAX_ACTS = 3  # upper bound of the acts of a job whose last act is repeated
RESTART_POLICY = {"maxRestarts": 2, "maxInfrastructureRestarts": 1000, "backoffSeconds": 1, "maxBackoffSeconds": 5}


class Act(StrEnum):
    """Act that the soak test performs on a running attempt."""

    SUCCEED = "every node succeeds"
    KILL_RANK = "a rank is killed"
    KILL_CONTAINER = "a container is killed"
    EXIT_EARLY = "a node ends with exit 0 and no result"
    CRASH = "a rank crashes"
    FILL_GPU = "a GPU runs out of memory"
    FILL_MEMORY = "a container runs out of memory"
    READ_BAD_ROWS = "a row is malformed"
    DELETE_POD = "a pod is deleted"
    DELETE_POD_BY_FORCE = "a pod is force-deleted"
    DELETE_JOB = "the job is deleted"


@dataclass(frozen=True)
class Script:
    """Acts on a job and its expected end. The last act is repeated; `reason` is empty if the job is deleted."""

    acts: tuple[Act, ...]
    phase: str
    reason: str

    def __str__(self) -> str:
        return ", then ".join(self.acts)

    def act(self, number: int) -> Act:
        """Return the act with this number."""
        return self.acts[min(number, len(self.acts) - 1)]


DELETED = "Deleted"
SCRIPTS = (
    Script((Act.SUCCEED,), "Complete", "Completed"),
    Script((Act.KILL_RANK, Act.SUCCEED), "Complete", "Completed"),
    Script((Act.KILL_CONTAINER, Act.SUCCEED), "Complete", "Completed"),
    Script((Act.EXIT_EARLY, Act.SUCCEED), "Complete", "Completed"),
    Script((Act.DELETE_POD, Act.DELETE_POD, Act.SUCCEED), "Complete", "Completed"),
    Script((Act.DELETE_POD_BY_FORCE, Act.SUCCEED), "Complete", "Completed"),
    Script((Act.FILL_GPU, Act.FILL_GPU, Act.SUCCEED), "Complete", "Completed"),
    Script((Act.KILL_RANK,), "Failed", "RankKilled"),
    Script((Act.KILL_CONTAINER,), "Failed", "ContainerKilled"),
    Script((Act.CRASH,), "Failed", "RankCrashed"),
    Script((Act.READ_BAD_ROWS,), "Failed", "DatasetError"),
    Script((Act.KILL_RANK, Act.FILL_MEMORY), "Failed", "HostOutOfMemory"),
    Script((Act.DELETE_POD, Act.DELETE_JOB), DELETED, ""),
)


@dataclass(frozen=True)
class JobPlan:
    """Plan of one job; each attempt runs for `run_seconds` before the next act."""

    name: str
    nodes: int
    script: Script
    start: float
    run_seconds: float


def plan_jobs(count: int, *, seconds: float, seed: int) -> tuple[JobPlan, ...]:
    """Plan jobs that start within the first tenth of the time and, without delays, end within nine tenths."""
    random_source = random.Random(seed)
    plans = []
    for number in range(count):
        script = SCRIPTS[number % len(SCRIPTS)]
        acts = max(len(script.acts), 1 if script.act(0) is Act.SUCCEED else MAX_ACTS)
        plans.append(
            JobPlan(
                name=f"soak-{number:04}",
                nodes=random_source.choice((1, 2, 2, 3)),
                script=script,
                start=random_source.uniform(0, 0.1) * seconds,
                run_seconds=random_source.uniform(0.1, 0.7) * seconds / acts,
            )
        )
    return tuple(plans)


def build_exit(act: Act, *, time: float) -> tuple[int, str, str]:
    """Return exit code, reason and termination message of the container that the act ends."""

    def failure_message(error_type: str, message: str, **details: Any) -> str:
        fields = {"outcome": "failed", "rank": 0, "errorType": error_type, "message": message, **details}
        return json.dumps({"final": True, "time": time, **fields})

    match act:
        case Act.SUCCEED:
            return 0, "Completed", json.dumps({"final": True, "outcome": "succeeded", "time": time})
        case Act.KILL_RANK:
            return 1, "Error", failure_message("RankKilled", "rank 0 was killed", signal=9)
        case Act.CRASH:
            return 1, "Error", failure_message("RankKilled", "rank 0 crashed", signal=11)
        case Act.FILL_GPU:
            return 2, "Error", failure_message("CudaOutOfMemory", "ran out of GPU memory")
        case Act.READ_BAD_ROWS:
            return 2, "Error", failure_message("DatasetError", "train.jsonl line 2: no messages")
        case Act.KILL_CONTAINER:
            return 137, "Error", ""
        case Act.FILL_MEMORY:
            return 137, "OOMKilled", ""
        case Act.EXIT_EARLY:
            return 0, "Completed", json.dumps({"final": False, "outcome": "running"})
    raise AssertionError(f"act {act} does not end a container")
