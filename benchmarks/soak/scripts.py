"""Scripts of a soak test, which define the actions on each job and its expected final state."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

RawBody = dict[str, Any]

MAX_RUN_SECONDS = 60.0
RESTART_POLICY = {"maxRestarts": 2, "maxInfrastructureRestarts": 1000, "backoffSeconds": 1, "maxBackoffSeconds": 5}


class ScriptAction(StrEnum):
    """Action that the soak test performs on a running attempt."""

    SUCCEED = "every node succeeds"
    KILL_RANK = "a rank is killed"
    KILL_CONTAINER = "a container is killed"
    EXIT_EARLY = "a node ends with exit 0 and no result"
    CRASH = "a rank crashes"
    FILL_GPU = "a GPU runs out of memory"
    FILL_MEMORY = "a container runs out of memory"
    READ_BAD_ROWS = "a row is malformed"
    DELETE_POD = "a pod is deleted"
    FORCE_DELETE_POD = "a pod is force-deleted"
    DELETE_JOB = "the job is deleted"
    RECREATE_JOB = "the job is deleted and created again"
    SUSPEND = "the job is suspended and resumed"
    EDIT = "the job is suspended, edited and resumed"
    FLIP = "the job is suspended and resumed at once"


SUSPENSIONS = (ScriptAction.SUSPEND, ScriptAction.EDIT, ScriptAction.FLIP)


@dataclass(frozen=True)
class Script:
    """Actions on a job, of which the last is repeated, and the expected final phase and reason of the job."""

    actions: tuple[ScriptAction, ...]
    phase: str
    reason: str

    def __str__(self) -> str:
        return ", then ".join(self.actions)

    def get_action(self, number: int) -> ScriptAction:
        """Return the action with the given number, or the last action if the script has fewer actions."""
        return self.actions[min(number, len(self.actions) - 1)]


DELETED = "Deleted"
SCRIPTS = (
    Script((ScriptAction.SUCCEED,), "Complete", "Completed"),
    Script((ScriptAction.KILL_RANK, ScriptAction.SUCCEED), "Complete", "Completed"),
    Script((ScriptAction.KILL_CONTAINER, ScriptAction.SUCCEED), "Complete", "Completed"),
    Script((ScriptAction.EXIT_EARLY, ScriptAction.SUCCEED), "Complete", "Completed"),
    Script((ScriptAction.DELETE_POD, ScriptAction.DELETE_POD, ScriptAction.SUCCEED), "Complete", "Completed"),
    Script((ScriptAction.FORCE_DELETE_POD, ScriptAction.SUCCEED), "Complete", "Completed"),
    Script((ScriptAction.FILL_GPU, ScriptAction.FILL_GPU, ScriptAction.SUCCEED), "Complete", "Completed"),
    Script((ScriptAction.KILL_RANK,), "Failed", "RankKilled"),
    Script((ScriptAction.KILL_CONTAINER,), "Failed", "ContainerKilled"),
    Script((ScriptAction.CRASH,), "Failed", "RankCrashed"),
    Script((ScriptAction.READ_BAD_ROWS,), "Failed", "DatasetError"),
    Script((ScriptAction.KILL_RANK, ScriptAction.FILL_MEMORY), "Failed", "HostOutOfMemory"),
    Script((ScriptAction.DELETE_POD, ScriptAction.DELETE_JOB), DELETED, ""),
    Script((ScriptAction.SUSPEND, ScriptAction.SUCCEED), "Complete", "Completed"),
    Script((ScriptAction.KILL_RANK, ScriptAction.EDIT, ScriptAction.SUCCEED), "Complete", "Completed"),
    Script((ScriptAction.FLIP, ScriptAction.FLIP, ScriptAction.SUCCEED), "Complete", "Completed"),
    Script((ScriptAction.EDIT, ScriptAction.KILL_CONTAINER), "Failed", "ContainerKilled"),
    Script((ScriptAction.DELETE_POD, ScriptAction.RECREATE_JOB, ScriptAction.SUCCEED), "Complete", "Completed"),
    Script((ScriptAction.RECREATE_JOB, ScriptAction.CRASH), "Failed", "RankCrashed"),
)


@dataclass(frozen=True)
class JobPlan:
    """Plan of one job; each attempt runs for `run_seconds` before the next action."""

    name: str
    nodes: int
    script: Script
    start_seconds: float
    run_seconds: float
    ttl_seconds: int | None  # after its end, the operator deletes the job


def plan_jobs(count: int, *, seconds: float, seed: int) -> tuple[JobPlan, ...]:
    """Plan jobs that start evenly in the first nine tenths of the test."""
    random_source = random.Random(seed)
    longest = min(MAX_RUN_SECONDS, seconds / 15)
    return tuple(
        JobPlan(
            name=f"soak-{number:04}",
            nodes=random_source.choice((1, 2, 2, 3)),
            script=SCRIPTS[number % len(SCRIPTS)],
            start_seconds=0.9 * seconds * number / count,
            run_seconds=random_source.uniform(0.1, 1.0) * longest,
            ttl_seconds=random_source.choice((None, 60, 600)),
        )
        for number in range(count)
    )


def build_container_exit(action: ScriptAction, *, time: float) -> tuple[int, str, str]:
    """Return the exit code, reason and termination message of the container that the action terminates."""

    def build_failure_message(error_type: str, message: str, **details: Any) -> str:
        fields = {"outcome": "failed", "rank": 0, "errorType": error_type, "message": message, **details}
        return json.dumps({"final": True, "time": time, **fields})

    match action:
        case ScriptAction.SUCCEED:
            return 0, "Completed", json.dumps({"final": True, "outcome": "succeeded", "time": time})
        case ScriptAction.KILL_RANK:
            return 1, "Error", build_failure_message("RankKilled", "rank 0 was killed", signal=9)
        case ScriptAction.CRASH:
            return 1, "Error", build_failure_message("RankKilled", "rank 0 crashed", signal=11)
        case ScriptAction.FILL_GPU:
            return 2, "Error", build_failure_message("CudaOutOfMemory", "ran out of GPU memory")
        case ScriptAction.READ_BAD_ROWS:
            return 2, "Error", build_failure_message("DatasetError", "train.jsonl line 2: no messages")
        case ScriptAction.KILL_CONTAINER:
            return 137, "Error", ""
        case ScriptAction.FILL_MEMORY:
            return 137, "OOMKilled", ""
        case ScriptAction.EXIT_EARLY:
            return 0, "Completed", json.dumps({"final": False, "outcome": "running"})
    raise AssertionError(f"action {action} does not end a container")
