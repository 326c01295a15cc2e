"""What the operator tells about a job. Logic reads conditions and attempts; `phase` and `display` are for people."""

import math
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AwareDatetime, BeforeValidator, Field

from finetune_api.v1alpha1.base import StatusModel, list_map


class Phase(StrEnum):
    """One word for a person reading a list; never read by logic."""

    QUEUED = "Queued"
    STARTING = "Starting"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"


class Fault(StrEnum):
    """Who has to act; restart budgets are kept by fault."""

    USER = "user"
    RESOURCE = "resource"
    INFRASTRUCTURE = "infrastructure"
    PREEMPTION = "preemption"
    TRANSIENT = "transient"
    UNKNOWN = "unknown"


class AttemptState(StrEnum):
    """Where one attempt is in its life."""

    STARTING = "Starting"
    RUNNING = "Running"
    STOPPING = "Stopping"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    STOPPED = "Stopped"


class Condition(StatusModel):
    """A condition as metav1.Condition has it."""

    type: str = Field(description="Running, Complete, Failed, Suspended, Finished, Reconciling or Stalled.")
    status: Literal["True", "False", "Unknown"] = Field(description="True, False or Unknown.")
    observed_generation: int = Field(default=0, description="metadata.generation that the condition is about.")
    last_transition_time: AwareDatetime = Field(description="When the status last changed.")
    reason: str = Field(description="A stable CamelCase word.")
    message: str = Field(default="", description="What a person should know, in one line.")


class Evidence(StatusModel):
    """What one node left behind; enough to judge it after its pod is gone."""

    node_rank: int = Field(description="Node rank.")
    pod_name: str = Field(default="", description="Its pod.")
    k8s_node: str = Field(default="", description="The Kubernetes node it ran on.")
    ended: bool = Field(default=False, description="Its container ended, or the pod is gone.")
    reason: str = Field(default="", description="What Kubernetes says of the container or pod, such as OOMKilled.")
    disruption: str = Field(default="", description="Reason of the pod's DisruptionTarget condition.")
    deleted: bool = Field(default=False, description="Somebody else deleted the pod while the attempt was to go on.")
    outcome: str = Field(default="", description="What the supervisor said last: succeeded, stopped, failed, running.")
    error_type: str = Field(default="", description="Class of the error that the first failing rank raised.")
    victim: bool = Field(default=False, description="That rank only suffered from the death of another.")
    exit_code: int | None = Field(default=None, description="Exit code of the container.")
    rank: int | None = Field(default=None, description="The rank that failed first on this node.")
    signal: int | None = Field(default=None, description="The signal that ended that rank.")
    message: str = Field(default="", description="The error, in its own words.")
    last_step: int | None = Field(default=None, description="The last step this node reported.")
    finished_at: AwareDatetime | None = Field(default=None, description="When it happened.")


class AttemptRecord(StatusModel):
    """One attempt: what happened, whose fault it was and what was done."""

    attempt: int = Field(description="Number, from 0; part of the names of its pods.")
    state: AttemptState = Field(description="Starting, Running, Stopping, Succeeded, Failed or Stopped.")
    created: bool = Field(default=False, description="All its objects were made: a missing pod is now a lost one.")
    not_before: AwareDatetime | None = Field(default=None, description="Its pods are not made earlier than this.")
    avoids: tuple[str, ...] = Field(
        default=(), description="Kubernetes nodes that failed the job before; its pods are kept away from them."
    )
    start_time: AwareDatetime | None = Field(default=None, description="When it was decided.")
    pending_since: AwareDatetime | None = Field(
        default=None, description="Since when nodes are to start and do not all run, over all attempts."
    )
    running_time: AwareDatetime | None = Field(default=None, description="When all its nodes ran.")
    end_time: AwareDatetime | None = Field(default=None, description="When its end was decided.")
    first_step: int | None = Field(default=None, description="The step it resumed from.")
    first_step_time: AwareDatetime | None = Field(default=None, description="When it had done a step.")
    last_step: int | None = Field(default=None, description="The last step it reported.")
    downtime_seconds: int | None = Field(
        default=None, description="From its end until an attempt had done a step again, if it failed after one itself."
    )
    steps_lost: int | None = Field(default=None, description="Steps that had to be done again.")
    reason: str = Field(default="", description="Why it ended.")
    fault: Fault | None = Field(default=None, description="Who has to act.")
    action: str = Field(default="", description="What the operator did: Restart, Repair, Fail, Suspend or Complete.")
    node_rank: int | None = Field(default=None, description="The node that caused the end.")
    rank: int | None = Field(default=None, description="The rank that caused the end.")
    k8s_node: str = Field(default="", description="The Kubernetes node that caused the end.")
    message: str = Field(default="", description="The end in one line.")
    evidence: tuple[Evidence, ...] = Field(
        default=(), description="What nodes left behind; in the end, of the eight that tell most."
    )


class RestartCounts(StatusModel):
    """Restarts since the job last got further than ever before; limits are kept against these."""

    counted: int = Field(default=0, description="After transient, resource and unexplained failures.")
    infrastructure: int = Field(default=0, description="After lost, evicted and preempted nodes.")
    best_step: int = Field(default=0, description="The furthest step any attempt reported.")


def _finite_or_none(value: object) -> object:
    """JSON knows no NaN, and the API server would refuse the whole status for one."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


Measured = Annotated[float | None, BeforeValidator(_finite_or_none)]


class MemoryStatus(StatusModel):
    """Memory of the ranks in bytes: on their GPUs, or resident where there are none."""

    forecast: int | None = Field(default=None, description="What a rank was forecast to need at most.")
    peak_highest: int = Field(default=0, description="The most that any rank held.")
    peak_highest_rank: int = Field(default=0, description="Which rank that was.")
    peak_lowest: int = Field(default=0, description="The peak of the rank that needed least.")
    peak_lowest_rank: int = Field(default=0, description="Which rank that was.")
    reserved: int | None = Field(default=None, description="What torch's allocator took from the GPU for the highest.")
    cause: str | None = Field(default=None, description="The step of the highest peak and its longest sequence.")


class Progress(StatusModel):
    """How far training is, as rank 0 last reported."""

    step: int = Field(default=0, description="Optimizer steps done.")
    first_step: int | None = Field(default=None, description="The step from which the present attempt went on.")
    first_step_time: AwareDatetime | None = Field(default=None, description="When that attempt had done a step.")
    total_steps: int | None = Field(default=None, description="Optimizer steps in all.")
    epoch: Measured = Field(default=None, description="Passes over the rows.")
    loss: Measured = Field(default=None, description="Training loss of the last report.")
    eval_loss: Measured = Field(default=None, description="Last evaluation loss.")
    learning_rate: Measured = Field(default=None, description="Learning rate of the last step.")
    grad_norm: Measured = Field(default=None, description="Gradient norm of the last step.")
    tokens_per_second: Measured = Field(default=None, description="Tokens of all ranks per second.")
    samples_per_second: Measured = Field(default=None, description="Samples of all ranks per second.")
    step_seconds: Measured = Field(default=None, description="Time of a step, without evaluation and checkpoints.")
    mfu: Measured = Field(default=None, description="Model FLOPs utilisation, 0 to 1, where the GPU's peak is known.")
    data_wait_share: Measured = Field(default=None, description="Share of a step spent waiting for the next batch.")
    slow_rank: str | None = Field(
        default=None, description="The slowest rank, if it takes over 10 % longer than the median rank."
    )
    eta_seconds: int | None = Field(default=None, description="Seconds to the last step at the present pace.")
    last_checkpoint: str | None = Field(default=None, description="Name of the newest whole checkpoint.")
    best_step: int | None = Field(default=None, description="Step of the best evaluation, where they are compared.")
    best_metric: Measured = Field(default=None, description="What training.metricForBestModel was then.")
    stopped_early: bool | None = Field(default=None, description="Training ended because evaluations got no better.")
    ended: str | None = Field(default=None, description="How training ended, and whose weights the result holds.")
    per_device_train_batch_size: int | None = Field(
        default=None, description="Samples per rank and forward pass, where auto left it to the trainer."
    )
    memory: MemoryStatus | None = Field(default=None, description="Forecast and peaks of memory.")
    update_time: AwareDatetime | None = Field(default=None, description="When this was reported.")


class BatchStatus(StatusModel):
    """The batch as it is trained; with perDeviceTrainBatchSize auto, from when the trainer has chosen one."""

    per_device_train_batch_size: int = Field(description="Samples per rank and forward pass.")
    gradient_accumulation_steps: int = Field(description="Forward passes per optimizer step.")
    world_size: int = Field(description="Ranks.")
    effective: int = Field(description="The product: samples per optimizer step.")


class Repair(StatusModel):
    """What was changed so that the job fits into memory; what is set stands in the place of the spec's."""

    per_device_train_batch_size: int | None = Field(default=None, description="Samples per rank and forward pass.")
    gradient_accumulation_steps: int | None = Field(default=None, description="Forward passes per optimizer step.")
    gradient_checkpointing: bool | None = Field(default=None, description="Activations are recomputed.")
    expandable_segments: bool | None = Field(default=None, description="The allocator leaves fewer gaps.")
    deepspeed: str | None = Field(default=None, description="Preset that spreads memory over the ranks.")
    memory: str | None = Field(default=None, description="Memory limit of every node.")
    shm_size: str | None = Field(default=None, description="Size of /dev/shm.")
    num_workers: int | None = Field(default=None, description="Loader processes per rank.")


class NodeStatus(StatusModel):
    """One node of the present attempt."""

    node_rank: int = Field(description="Node rank.")
    pod_name: str = Field(description="Its pod.")
    k8s_node: str = Field(default="", description="The Kubernetes node it runs on.")
    phase: str = Field(default="", description="Phase of the pod, or what it waits for.")


class WaitStatus(StatusModel):
    """What keeps pods from starting."""

    reason: str = Field(description="A stable CamelCase word.")
    message: str = Field(default="", description="What is missing, in one line.")
    since: AwareDatetime = Field(description="Since when.")


class Display(StatusModel):
    """The columns of `kubectl get`, ready to print."""

    nodes: str = Field(default="", description="Running and wanted nodes.")
    progress: str = Field(default="", description="Percent and steps.")
    loss: str = Field(default="", description="Training loss.")
    tokens_per_second: str = Field(default="", description="Throughput.")
    eta: str = Field(default="", description="Time left.")


class JobStatus(StatusModel):
    """What is, as the operator last saw it."""

    observed_generation: int = Field(default=0, description="metadata.generation this status is about.")
    phase: Phase | None = Field(default=None, description="One word for people.")
    conditions: tuple[Condition, ...] = Field(
        default=(),
        description="Running, Suspended, Complete, Failed, Finished, Reconciling, Stalled.",
        json_schema_extra=list_map("type"),
    )
    attempt: int | None = Field(default=None, description="The present attempt.")
    attempts: tuple[AttemptRecord, ...] = Field(
        default=(),
        description="The last 20 attempts, oldest first; rather older ones for which a Kubernetes node is avoided.",
    )
    restarts: int = Field(default=0, description="Restarts after failures so far.")
    without_progress: RestartCounts = Field(
        default=RestartCounts(), description="Restarts since the job last got further than ever before."
    )
    start_time: AwareDatetime | None = Field(default=None, description="When the first attempt was decided.")
    completion_time: AwareDatetime | None = Field(default=None, description="When the job became Complete or Failed.")
    suspended_seconds: int = Field(default=0, description="Time spent suspended; deadlines do not count it.")
    suspend_time: AwareDatetime | None = Field(default=None, description="Since when the job is suspended.")
    waiting: WaitStatus | None = Field(default=None, description="What the pods wait for before they can start.")
    progress: Progress | None = Field(default=None, description="How far training is.")
    batch: BatchStatus | None = Field(default=None, description="The batch as it is trained.")
    repair: Repair | None = Field(default=None, description="What was changed after memory ran out.")
    nodes: tuple[NodeStatus, ...] = Field(default=(), description="The nodes of the present attempt.")
    output: str | None = Field(default=None, description="Claim and folder of checkpoints and result.")
    display: Display | None = Field(default=None, description="The columns of kubectl get.")
