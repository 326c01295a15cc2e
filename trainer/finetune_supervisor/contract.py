"""Contract between operator, supervisor and ranks: environment variables, paths, phases, outcomes and user errors.

The API and the operator import this module, so it may import only the standard library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMESPACE = "FINETUNE_NAMESPACE"
JOB = "FINETUNE_JOB"
JOB_UID = "FINETUNE_JOB_UID"
ATTEMPT = "FINETUNE_ATTEMPT"
WORLD_SIZE = "FINETUNE_WORLD_SIZE"
CONFIG = "FINETUNE_CONFIG"
CONFIG_MAP = "FINETUNE_CONFIG_MAP"  # name of the ConfigMap that contains the config
CONFIG_SHA256 = "FINETUNE_CONFIG_SHA256"  # digests of its files, `name=digest,name=digest`
OUTPUT = "FINETUNE_OUTPUT"
CACHE_DIR = "FINETUNE_CACHE_DIR"
RUN_DIR = "FINETUNE_RUN_DIR"
TERMINATION_LOG = "FINETUNE_TERMINATION_LOG"
STATUS_HOST = "FINETUNE_STATUS_HOST"  # address of the status server; absent in pods, whose IP the operator polls
STATUS_PORT = "FINETUNE_STATUS_PORT"
GRACE_SECONDS = "FINETUNE_GRACE_SECONDS"
HANG_SECONDS = "FINETUNE_HANG_SECONDS"
CPUS = "FINETUNE_CPUS"  # CPUs of the container: its limit, or its request; absent if it has neither
GPUS = "FINETUNE_GPUS"  # NVIDIA GPUs of the container, absent if it has none
OTHER_GPUS = "FINETUNE_OTHER_GPUS"  # resource of the GPUs of another vendor in the limits, such as amd.com/gpu
HIDDEN_ENV = "FINETUNE_HIDDEN_ENV"  # comma-separated names of variables set from Secrets

DEFAULTS_FILE = "defaults.json"  # next to the spec; contains the defaults of spec fields when the job began

DEFAULT_STATUS_PORT = 8080
DEFAULT_TERMINATION_LOG = "/dev/termination-log"
MAX_TERMINATION_BYTES = 4096  # the kubelet truncates longer messages at the start

# Phases of a rank in chronological order; DONE and STOPPED are final.
INIT, LOAD, TRAIN, EVAL, SAVE, PUBLISH = "init", "load", "train", "eval", "save", "publish"
DONE, STOPPED = "done", "stopped"

# Outcomes of a node, in addition to STOPPED.
STARTING, RUNNING, SUCCEEDED, FAILED = "starting", "running", "succeeded", "failed"

# Values of spec.command.progressFrom.
PROGRESS_FROM_LOG, PROGRESS_FROM_POSTS = "log", "posts"

HANG = "Hang"  # error type of ranks that send no heartbeats
CONFIG_MAP_REPLACED = "ConfigMapReplaced"  # error type of a node whose ConfigMap has other content than the operator's

# Exceptions of finetune_trainer.errors that a restart cannot fix; a test keeps both lists equal.
USER_ERRORS = (
    "ChatTemplateError",
    "CheckpointCorrupt",
    "DatasetError",
    "Degraded",
    "InvalidSpec",
    "MixedHardware",
    "ModelError",
    "ModelNotFound",
    "NonFiniteLoss",
    "OutputError",
    "WorldSizeMismatch",
)

# Other classes of errors by which the operator decides, besides the reasons of error_patterns.
LAUNCH_FAULTS = ("DnsTimeout", "LauncherFailed", "RendezvousConnectionError", "RendezvousTimeoutError")
RANK_FAULTS = ("OutOfMemoryError", "RankExited", "RankKilled", "UnknownError")


class InvalidEnvironment(Exception):
    """An environment variable that the operator sets is missing or has an invalid value."""


@dataclass(frozen=True)
class RunFolder:
    """Folder through which supervisor, launcher and ranks of one node exchange files."""

    path: Path

    @property
    def config(self) -> Path:
        """Folder of the verified copies of the spec and the recorded defaults."""
        return self.path / "config"

    @property
    def heartbeats(self) -> Path:
        """Folder of the heartbeat files, one per rank."""
        return self.path / "ranks"

    @property
    def stack_dumps(self) -> Path:
        """Folder of the stack dumps that ranks write on request."""
        return self.path / "stacks"

    @property
    def error_files(self) -> Path:
        """Folder of the ranks' error files, which the launcher or the user's torchrun writes."""
        return self.path / "torchrun"

    def have_ranks_started(self) -> bool:
        """Return whether the launcher has created the error file folders, right before it starts the ranks."""
        return any(self.error_files.glob("*/attempt_*"))

    @property
    def rank_exits(self) -> Path:
        """File with the exit code and end time of each failed rank."""
        return self.path / "exits.json"

    @property
    def launcher_error(self) -> Path:
        """File with the launcher's own exception, in the format of a rank's error file."""
        return self.path / "launcher-error.json"

    @property
    def token(self) -> Path:
        """File with the token that authenticates progress reports of a user command."""
        return self.path / "progress-token"

    @property
    def stop_request(self) -> Path:
        """File whose existence requests that the ranks save a checkpoint and exit."""
        return self.path / "stop"


@dataclass(frozen=True)
class Node:
    """One node of one attempt, read from the environment of its pod."""

    namespace: str
    job: str
    uid: str
    attempt: int
    node_rank: int
    num_nodes: int
    ranks_per_node: int
    world_size: int
    master_addr: str
    master_port: int
    output: Path | None  # None for a command without spec.output
    run_folder: RunFolder
    termination_log: Path
    status_port: int
    grace_seconds: float
    hang_seconds: float  # time limit of one step; 0 disables hang detection
    status_host: str = ""  # "" means all interfaces

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> Node:
        """Create a node from environment variables. Raises InvalidEnvironment."""
        return cls(
            namespace=read_text(env, NAMESPACE),
            job=read_text(env, JOB),
            uid=read_text(env, JOB_UID),
            attempt=read_int(env, ATTEMPT),
            node_rank=read_int(env, "NODE_RANK"),
            num_nodes=read_int(env, "NNODES"),
            ranks_per_node=read_int(env, "NPROC_PER_NODE"),
            world_size=read_int(env, WORLD_SIZE),
            master_addr=read_text(env, "MASTER_ADDR"),
            master_port=read_int(env, "MASTER_PORT"),
            output=Path(env[OUTPUT]) if env.get(OUTPUT) else None,
            run_folder=RunFolder(Path(read_text(env, RUN_DIR))),
            termination_log=Path(env.get(TERMINATION_LOG) or DEFAULT_TERMINATION_LOG),
            status_port=read_int(env, STATUS_PORT, default=DEFAULT_STATUS_PORT),
            grace_seconds=read_int(env, GRACE_SECONDS, default=120),
            hang_seconds=read_int(env, HANG_SECONDS, default=0),
            status_host=env.get(STATUS_HOST, ""),
        )

    def to_global_rank(self, local_rank: int) -> int:
        """Convert a local rank of this node to its global rank."""
        return self.node_rank * self.ranks_per_node + local_rank

    @property
    def log(self) -> Path | None:
        """Log file of the node in the job's output folder; None if the job has no output."""
        folder = self.output and self.output / "logs" / f"attempt-{self.attempt}"
        return folder and folder / f"node-{self.node_rank}.log"

    @property
    def final_message(self) -> Path | None:
        """Copy of the final termination message, beside the log of the node; None if the job has no output."""
        return self.log and self.log.with_suffix(".json")


def read_text(env: Mapping[str, str], name: str) -> str:
    """Return the value of a required environment variable. Raises InvalidEnvironment."""
    value = env.get(name, "")
    if not value:
        raise InvalidEnvironment(f"environment variable {name} is missing; the operator and local mode set it")
    return value


def read_int(env: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    """Return the value of an environment variable as a non-negative integer. Raises InvalidEnvironment."""
    value = env.get(name, "")
    if not value and default is not None:
        return default
    if not value.isdigit():
        raise InvalidEnvironment(f"environment variable {name} must be a whole number, not {value!r}")
    return int(value)


def parse_json(content: str | bytes) -> Any:
    """Parse JSON that others wrote. Raises json.JSONDecodeError, also for what json.loads answers with other errors."""
    try:
        return json.loads(content)
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        problem = "nested too deeply, a number with too many digits, or not UTF-8"
        raise json.JSONDecodeError(problem, "", 0) from error


def to_camel(name: str) -> str:
    """Convert a name such as `eta_seconds` to `etaSeconds`, the spelling of custom resource fields."""
    first, *rest = name.split("_")
    return first + "".join(word[:1].upper() + word[1:] for word in rest)
