"""The names that operator, supervisor and ranks share: environment, files of the run folder, words for phases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

NAMESPACE = "FINETUNE_NAMESPACE"
JOB = "FINETUNE_JOB"
JOB_UID = "FINETUNE_JOB_UID"
ATTEMPT = "FINETUNE_ATTEMPT"
WORLD_SIZE = "FINETUNE_WORLD_SIZE"
CONFIG = "FINETUNE_CONFIG"
OUTPUT = "FINETUNE_OUTPUT"
CACHE_DIR = "FINETUNE_CACHE_DIR"
RUN_DIR = "FINETUNE_RUN_DIR"
TERMINATION_LOG = "FINETUNE_TERMINATION_LOG"
STATUS_PORT = "FINETUNE_STATUS_PORT"
GRACE_SECONDS = "FINETUNE_GRACE_SECONDS"
HANG_SECONDS = "FINETUNE_HANG_SECONDS"
HIDDEN_ENV = "FINETUNE_HIDDEN_ENV"  # names of variables that come from Secrets

# What the ranks are doing, in this order; the last two are ends.
INIT, LOAD, TRAIN, EVAL, SAVE, PUBLISH = "init", "load", "train", "eval", "save", "publish"
DONE, STOPPED = "done", "stopped"

# What became of the node.
STARTING, RUNNING, SUCCEEDED, FAILED = "starting", "running", "succeeded", "failed"  # and STOPPED

HANG = "Hang"  # error type of ranks that give no sign of life

# Errors of finetune_trainer.errors that a restart cannot mend; a test holds the two lists together.
USER_ERRORS = (
    "ChatTemplateError",
    "CheckpointCorrupt",
    "DatasetError",
    "InvalidSpec",
    "MixedHardware",
    "ModelError",
    "ModelNotFound",
    "NonFiniteLoss",
    "OutputError",
    "WorldSizeMismatch",
)


class EnvironmentProblem(Exception):
    """A variable of the operator's environment is missing or not what it should be."""


@dataclass(frozen=True)
class RunFolder:
    """The pod's own folder, through which supervisor, launcher and ranks of one node talk."""

    path: Path

    @property
    def heartbeats(self) -> Path:
        return self.path / "ranks"

    @property
    def stacks(self) -> Path:
        """Where the ranks write what they are doing, when they are asked."""
        return self.path / "stacks"

    @property
    def torchrun(self) -> Path:
        """The error file of each rank lies somewhere below, ours or those of a torchrun that a command starts."""
        return self.path / "torchrun"

    def ranks_began(self) -> bool:
        """The launcher makes their folders when all nodes have met, just before it lets them go."""
        return any(self.torchrun.glob("*/attempt_*"))

    @property
    def exits(self) -> Path:
        """Exit codes of failed ranks, and when each ended."""
        return self.path / "exits.json"

    @property
    def launcher_error(self) -> Path:
        """What the launcher itself raised, in the format of a rank's error file."""
        return self.path / "launcher-error.json"

    @property
    def token(self) -> Path:
        """By which a program of the user's own proves that its progress is its own."""
        return self.path / "progress-token"

    @property
    def stop_request(self) -> Path:
        """Its existence asks the ranks to save and end."""
        return self.path / "stop"


@dataclass(frozen=True)
class Node:
    """One node of one attempt, as its environment describes it."""

    namespace: str
    job: str
    uid: str
    attempt: int
    node_rank: int
    nodes: int
    ranks_per_node: int
    world_size: int
    master_addr: str
    master_port: int
    output: Path | None  # None: a command that asked for none
    run: RunFolder
    termination_log: Path
    status_port: int
    grace_seconds: float
    hang_seconds: float  # without a step, after which ranks hang; 0: never

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> Node:
        return cls(
            namespace=text(env, NAMESPACE),
            job=text(env, JOB),
            uid=text(env, JOB_UID),
            attempt=number(env, ATTEMPT),
            node_rank=number(env, "NODE_RANK"),
            nodes=number(env, "NNODES"),
            ranks_per_node=number(env, "NPROC_PER_NODE"),
            world_size=number(env, WORLD_SIZE),
            master_addr=text(env, "MASTER_ADDR"),
            master_port=number(env, "MASTER_PORT"),
            output=Path(env[OUTPUT]) if env.get(OUTPUT) else None,
            run=RunFolder(Path(text(env, RUN_DIR))),
            termination_log=Path(env.get(TERMINATION_LOG) or "/dev/termination-log"),
            status_port=number(env, STATUS_PORT, default=8080),
            grace_seconds=number(env, GRACE_SECONDS, default=120),
            hang_seconds=number(env, HANG_SECONDS, default=0),
        )

    def global_rank(self, local_rank: int) -> int:
        return self.node_rank * self.ranks_per_node + local_rank

    @property
    def log(self) -> Path | None:
        """The supervisor's copy of the node's lines."""
        folder = self.output and self.output / "logs" / f"attempt-{self.attempt}"
        return folder and folder / f"node-{self.node_rank}.log"


def text(env: Mapping[str, str], name: str) -> str:
    value = env.get(name, "")
    if not value:
        raise EnvironmentProblem(f"environment variable {name} is missing; the operator and local mode set it")
    return value


def number(env: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    value = env.get(name, "")
    if not value and default is not None:
        return default
    if not value.isdigit():
        raise EnvironmentProblem(f"environment variable {name} must be a whole number, not {value!r}")
    return int(value)


def to_camel(name: str) -> str:
    """`eta_seconds` -> `etaSeconds`, as the resource spells it."""
    first, *rest = name.split("_")
    return first + "".join(part[:1].upper() + part[1:] for part in rest)
