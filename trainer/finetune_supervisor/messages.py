"""Progress and termination messages of a node.

This module is the only definition of their fields. finetune_api derives its validating classes and status.progress of
the custom resource from them; pydantic reads the descriptions from the metadata. It uses only the standard library, see
contract.py and decisions/408.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from finetune_supervisor.contract import STARTING, to_camel


@dataclass(frozen=True)
class PeakMemory:
    """Memory of the ranks in bytes: GPU memory, or resident set size without GPUs."""

    forecast: int | None = field(default=None, metadata={"description": "Forecast of the peak memory of a rank."})
    peak_highest: int = field(default=0, metadata={"description": "Highest peak of all ranks."})
    peak_highest_rank: int = field(default=0, metadata={"description": "Rank with the highest peak."})
    peak_lowest: int = field(default=0, metadata={"description": "Lowest peak of all ranks."})
    peak_lowest_rank: int = field(default=0, metadata={"description": "Rank with the lowest peak."})
    reserved: int | None = field(
        default=None,
        metadata={"description": "Memory reserved by torch's allocator on the rank with the highest peak."},
    )
    cause: str | None = field(
        default=None, metadata={"description": "Step of the highest peak, and its longest sequence."}
    )


@dataclass(frozen=True)
class NodePairBandwidth:
    """Measured bandwidth between two nodes, in each direction at the same time."""

    nodes: str = field(default="", metadata={"description": "Node ranks, such as 0-1."})
    gbps: float = field(default=0.0, metadata={"description": "Gbit/s in each direction, summed over the ranks."})


@dataclass(frozen=True)
class NetworkBandwidth:
    """Bandwidth between the ranks, measured before the first step."""

    all_reduce_gbps: float = field(
        default=0.0, metadata={"description": "Bus bandwidth of an all-reduce over all ranks in Gbit/s."}
    )
    intra_node_gbps: float | None = field(
        default=None, metadata={"description": "Bus bandwidth of an all-reduce within the slowest node in Gbit/s."}
    )
    pairs: tuple[NodePairBandwidth, ...] = field(
        default=(),
        metadata={
            "description": "Bandwidth between nodes, slowest pairs first, at most 64.",
            "json_schema_extra": {"maxItems": 64},
        },
    )

    def __str__(self) -> str:
        parts = [f"all-reduce {self.all_reduce_gbps:g} Gbit/s"]
        if self.intra_node_gbps is not None:
            parts.append(f"within a node {self.intra_node_gbps:g}")
        if self.pairs:
            parts.append(f"slowest pair of nodes {self.pairs[0].nodes} {self.pairs[0].gbps:g}")
        return ", ".join(parts)


@dataclass(frozen=True)
class Degradation:
    """A circumstance that makes a job slower or less accurate than its hardware allows, but does not fail it."""

    reason: str = field(metadata={"description": "Stable CamelCase identifier, such as NetworkSockets."})
    message: str = field(default="", metadata={"description": "Explanation and remedy in one line."})


@dataclass(frozen=True)
class TrainingProgress:
    """Training progress, with the fields of status.progress in snake_case.

    Heartbeats lack `first_step`, `first_step_time` and `update_time`, which the supervisor adds.
    """

    step: int = field(default=0, metadata={"description": "Completed optimizer steps."})
    first_step: int | None = field(
        default=None, metadata={"description": "Optimizer step from which the current attempt resumed."}
    )
    first_step_time: datetime | None = field(
        default=None, metadata={"description": "When that attempt completed its first step."}
    )
    total_steps: int | None = field(default=None, metadata={"description": "Planned optimizer steps."})
    epoch: float | None = field(default=None, metadata={"description": "Completed epochs, with fraction."})
    loss: float | None = field(default=None, metadata={"description": "Last reported training loss."})
    eval_loss: float | None = field(default=None, metadata={"description": "Loss of the last evaluation."})
    learning_rate: float | None = field(default=None, metadata={"description": "Learning rate of the last step."})
    grad_norm: float | None = field(default=None, metadata={"description": "Gradient norm of the last step."})
    tokens_per_second: float | None = field(default=None, metadata={"description": "Tokens per second of all ranks."})
    samples_per_second: float | None = field(default=None, metadata={"description": "Samples per second of all ranks."})
    step_seconds: float | None = field(
        default=None, metadata={"description": "Seconds per optimizer step, without evaluation and checkpoints."}
    )
    mfu: float | None = field(
        default=None, metadata={"description": "Model FLOPs utilization, 0 to 1, if the GPU's peak is known."}
    )
    tokens_per_second_per_rank: float | None = field(
        default=None, metadata={"description": "Tokens per second divided by the number of ranks."}
    )
    scaling_efficiency: float | None = field(
        default=None,
        metadata={
            "description": "Estimated share of a step in which the ranks compute instead of waiting for each other, 0"
            " to 1; tokens per second grow with the number of ranks by this factor."
        },
    )
    gpu_utilization: float | None = field(
        default=None,
        metadata={"description": "Mean share of time in which the GPUs run a kernel, 0 to 1, as in nvidia-smi."},
    )
    data_wait_share: float | None = field(
        default=None, metadata={"description": "Fraction of a step spent waiting for the next batch."}
    )
    slow_rank: str | None = field(
        default=None, metadata={"description": "Slowest rank, if it takes over 10 % longer than the median rank."}
    )
    eta_seconds: int | None = field(default=None, metadata={"description": "Estimated seconds until the last step."})
    last_checkpoint: str | None = field(
        default=None, metadata={"description": "Name of the newest complete checkpoint."}
    )
    best_step: int | None = field(
        default=None, metadata={"description": "Step of the best evaluation, if evaluations are compared."}
    )
    best_metric: float | None = field(
        default=None, metadata={"description": "Value of training.metricForBestModel at that step."}
    )
    stopped_early: bool | None = field(
        default=None, metadata={"description": "Whether early stopping ended the training."}
    )
    ended: str | None = field(
        default=None, metadata={"description": "How training ended, and from which step the published weights are."}
    )
    per_device_train_batch_size: int | None = field(
        default=None, metadata={"description": "Samples per rank and forward pass that the trainer chose for auto."}
    )
    model_revision: str | None = field(default=None, metadata={"description": "Commit of the model on the Hub."})
    memory: PeakMemory | None = field(default=None, metadata={"description": "Memory of the ranks in bytes."})
    network: NetworkBandwidth | None = field(
        default=None, metadata={"description": "Bandwidth between the ranks, measured before the first step."}
    )
    from_log: bool | None = field(
        default=None,
        metadata={
            "description": "Whether the supervisor read this from lines of the program, see command.progressFrom."
        },
    )
    update_time: datetime | None = field(default=None, metadata={"description": "When rank 0 reported this."})


@dataclass(frozen=True)
class TerminationMessage:
    """Termination message of a node; `final` is false while the node is running."""

    node_rank: int = 0
    attempt: int = 0
    version: int = 1
    final: bool = False
    outcome: str = STARTING
    phase: str = ""  # a phase of contract.py; empty before the first heartbeat
    rank: int | None = None  # rank with the first failure on this node
    local_rank: int | None = None
    error_type: str = ""  # class name of the exception, or RankKilled, DnsTimeout, Hang
    message: str = ""
    category: str = ""  # reason of the first pattern that matches the whole text of the error
    stack: str = ""  # tail of the traceback
    exit_code: int | None = None  # exit code of the rank
    signal: int | None = None  # signal that terminated the rank
    victim: bool = False  # whether the rank failed only because a peer failed
    time: float | None = None  # time of the failure in seconds since the epoch
    first_step: int | None = None  # step from which this attempt resumed
    progress: TrainingProgress | None = None
    peak_memory_bytes: int | None = None  # maximum over the ranks of this node


def to_json_object(message: TrainingProgress | TerminationMessage) -> dict[str, object]:
    """Convert a message to a JSON object with camelCase keys, omitting None, empty strings, NaN and infinity."""
    json_object = _to_json(asdict(message))
    assert isinstance(json_object, dict)
    return json_object


def _to_json(value: Any) -> object:
    if isinstance(value, dict):
        values = ((to_camel(name), _to_json(item)) for name, item in value.items())
        return {name: item for name, item in values if item not in (None, "")}
    if isinstance(value, (list, tuple)):
        return [_to_json(item) for item in value]
    if isinstance(value, datetime):
        return value.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return None if isinstance(value, float) and not math.isfinite(value) else value
