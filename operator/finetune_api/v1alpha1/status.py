"""Defines the status of a job; `phase` and `display` are for people, not for programs."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AwareDatetime, Field, field_validator
from pydantic.dataclasses import dataclass

from finetune_api.untrusted_json import drop_invalid_time
from finetune_api.v1alpha1.base import MESSAGE_CONFIG, StatusModel, build_list_map_schema
from finetune_api.v1alpha1.repair import Repair
from finetune_api.v1alpha1.scheduling import SchedulingProvider, SchedulingStatus
from finetune_supervisor.messages import Degradation, TrainingProgress

MAX_SUSPENDED_SECONDS = 10**11


def _require_valid_time(value: datetime) -> datetime:
    if drop_invalid_time(value) is None:
        raise ValueError(f"{value.isoformat()} is not between 1970 and 2100")
    return value


StatusTime = Annotated[AwareDatetime, AfterValidator(_require_valid_time)]
# Bounds are part of the CRD, not of these classes, which must be able to parse the status of another release.
# schema.status_schema adds default bounds and truncates what exceeds a bound.
MESSAGE_BYTES = 1024
EVIDENCE_MESSAGE_BYTES = 800
MAX_LISTED_NODES = 64
MAX_DEGRADATIONS = 16
MAX_GPU_SECONDS = 64  # more than phases x faults
Identifier = Annotated[str, Field(json_schema_extra={"maxLength": 128})]
KubernetesName = Annotated[str, Field(json_schema_extra={"maxLength": 253})]
ImageReference = Annotated[str, Field(json_schema_extra={"maxLength": 1024})]
Message = Annotated[str, Field(json_schema_extra={"maxLength": MESSAGE_BYTES})]
ExitCode = Annotated[int, Field(json_schema_extra={"minimum": -(2**31), "maximum": 2**31 - 1})]


def _build_list_schema(max_items: int, key: str) -> dict[str, Any]:
    return {"maxItems": max_items, **build_list_map_schema(key)}


class Phase(StrEnum):
    """A one-word summary for people; programs read conditions instead."""

    QUEUED = "Queued"
    STARTING = "Starting"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"


class Fault(StrEnum):
    """Category of a failure's cause; each fault has a separate restart budget."""

    USER = "user"
    RESOURCE = "resource"
    INFRASTRUCTURE = "infrastructure"
    PREEMPTION = "preemption"
    TRANSIENT = "transient"
    UNKNOWN = "unknown"

    @classmethod
    def _missing_(cls, value: object) -> "Fault | None":
        """Read a fault of a newer release as unknown."""
        return cls.UNKNOWN if isinstance(value, str) else None


class AttemptState(StrEnum):
    """The state of one attempt."""

    STARTING = "Starting"
    RUNNING = "Running"
    STOPPING = "Stopping"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    STOPPED = "Stopped"


class Condition(StatusModel):
    """A condition as defined by metav1.Condition."""

    type: Identifier = Field(
        description="Running, Complete, Failed, Suspended, Finished, Reconciling, Stalled, Degraded,"
        " TrainerImageOutdated or OperatorRestricted."
    )
    status: Literal["True", "False", "Unknown"] = Field(description="True, False or Unknown.")
    observed_generation: int = Field(default=0, description="metadata.generation for which the condition was set.")
    last_transition_time: StatusTime = Field(description="When the status last changed.")
    reason: Identifier = Field(description="Stable CamelCase identifier.")
    message: Annotated[str, Field(json_schema_extra={"maxLength": 2 * MESSAGE_BYTES})] = Field(
        default="", description="Explanation in one line."
    )


class Evidence(StatusModel):
    """Evidence of how one node terminated, kept after its pod is deleted."""

    node_rank: int = Field(description="Node rank.")
    pod_name: KubernetesName = Field(default="", description="Name of its pod.")
    k8s_node: KubernetesName = Field(default="", description="Kubernetes node on which it ran.")
    ended: bool = Field(default=False, description="Whether its container ended or its pod is gone.")
    reason: Identifier = Field(default="", description="Reason of the container or pod status, such as OOMKilled.")
    disruption: Identifier = Field(
        default="", description="Reason of the pod's condition DisruptionTarget or, under Kueue, TerminationTarget."
    )
    preemptor: KubernetesName = Field(
        default="", description="Kueue workload in favour of which the pod was preempted, if the condition names it."
    )
    deleted: bool = Field(
        default=False, description="Whether the pod was deleted by another client during the attempt."
    )
    outcome: Identifier = Field(
        default="", description="Last outcome reported by the supervisor: succeeded, stopped, failed, running."
    )
    error_type: Identifier = Field(default="", description="Class of the exception of the rank that failed first.")
    category: Identifier = Field(default="", description="Reason that the pod found in the whole text of the error.")
    victim: bool = Field(default=False, description="Whether the rank failed only because another rank failed.")
    exit_code: ExitCode | None = Field(default=None, description="Exit code of the container.")
    rank: int | None = Field(default=None, description="Rank that failed first on this node.")
    signal: int | None = Field(default=None, description="Signal that terminated the rank.")
    message: Annotated[str, Field(json_schema_extra={"maxLength": EVIDENCE_MESSAGE_BYTES})] = Field(
        default="", description="Message of the exception."
    )
    last_step: int | None = Field(
        default=None, description="Last optimizer step in its termination message; decides about restarts."
    )
    per_device_train_batch_size: int | None = Field(
        default=None, description="Samples per rank and forward pass that the trainer chose for auto."
    )
    finished_at: StatusTime | None = Field(default=None, description="When the node ended.")


class EvidenceSummary(StatusModel):
    """Nodes of a stopping attempt whose evidence is equal in all fields that decide the verdict."""

    ranks: Annotated[str, Field(json_schema_extra={"maxLength": 4096})] = Field(
        description="Node ranks, such as 0-3,7."
    )
    observed: bool = Field(default=False, description="Whether their pods were observed.")
    ended: bool = Field(default=False, description="Whether their containers ended or their pods are gone.")
    deleted: bool = Field(default=False, description="Whether their pods were deleted by another client.")
    reason: Identifier = Field(default="", description="Reason of the pod status, such as Relabelled.")
    disruption: Identifier = Field(default="", description="Reason of the condition that states their disruption.")
    preemptor: KubernetesName = Field(default="", description="Kueue workload in favour of which they were preempted.")
    outcome: Identifier = Field(default="", description="How the nodes ended: succeeded, stopped or failed.")
    victim: bool = Field(default=False, description="Whether they failed only because another node failed.")


class AttemptRecord(StatusModel):
    """Record of one attempt, including its times, failure reason, fault and the action of the operator."""

    attempt: int = Field(description="Number of the attempt, from 0; part of its pod names.")
    state: AttemptState = Field(description="The state of one attempt.")
    num_nodes: int | None = Field(
        default=None, description="Number of its nodes; spec.numNodes may have changed since it was started."
    )
    created: bool = Field(
        default=False, description="Whether all its objects were created; a pod that is missing later counts as lost."
    )
    start_key: Identifier = Field(
        default="",
        description="Value of the annotation finetune.dev/start-key of its pods, which is not known before the attempt"
        " is recorded; other pods with these names are not the operator's.",
    )
    pod_uids: Annotated[str, Field(json_schema_extra={"maxLength": 8192})] = Field(
        default="",
        description="First eight characters of the uid of each pod, in the order of the ranks, once all exist; other"
        " pods decide nothing. Only for the newest attempt.",
    )
    not_before: StatusTime | None = Field(default=None, description="Earliest time at which its pods are created.")
    avoids: tuple[KubernetesName, ...] = Field(
        default=(),
        description="Kubernetes nodes that its pods avoid because the job failed there before.",
        json_schema_extra={"maxItems": 32},
    )
    start_time: StatusTime | None = Field(default=None, description="When the attempt was started.")
    restart_fault: Fault | None = Field(
        default=None, description="Fault of the failure after which the attempt was started."
    )
    gpus: int | None = Field(
        default=None,
        description="GPUs, or other compute devices, of its pods that were assigned to a Kubernetes node.",
    )
    allocated_time: StatusTime | None = Field(
        default=None,
        description="When these GPUs were allocated: mean of the times at which the pods were assigned.",
    )
    pending_since: StatusTime | None = Field(
        default=None, description="Time since which at least one node has not been running, across attempts."
    )
    running_time: StatusTime | None = Field(default=None, description="When all nodes were running.")
    stop_time: StatusTime | None = Field(default=None, description="When the operator began to stop the attempt.")
    end_time: StatusTime | None = Field(default=None, description="When the operator ended the attempt.")
    first_step: int | None = Field(default=None, description="Optimizer step from which the attempt resumed.")
    first_step_time: StatusTime | None = Field(default=None, description="When the attempt completed its first step.")
    last_step: int | None = Field(
        default=None, description="Last optimizer step that the attempt reported; decides nothing."
    )
    last_step_time: StatusTime | None = Field(default=None, description="When the attempt reported that step.")
    downtime_seconds: int | None = Field(
        default=None,
        description="Seconds from the failure to the next completed step; only if the attempt completed a step itself.",
    )
    steps_lost: int | None = Field(default=None, description="Optimizer steps that had to be repeated.")
    reason: Identifier = Field(default="", description="Reason why the attempt ended.")
    fault: Fault | None = Field(
        default=None,
        description="Category of a failure's cause.",
    )
    action: Identifier = Field(
        default="", description="Action of the operator: Restart, Repair, Fail, Suspend or Complete."
    )
    node_rank: int | None = Field(default=None, description="Rank of the node that caused the attempt to end.")
    rank: int | None = Field(default=None, description="Rank that caused the attempt to end.")
    k8s_node: KubernetesName = Field(
        default="", description="Kubernetes node of the node that caused the attempt to end."
    )
    message: Message = Field(default="", description="Cause of the end of the attempt in one line.")
    spec_hash: Identifier = Field(
        default="",
        description="Hash of the spec fields that can be changed while the job is suspended; an attempt whose spec has"
        " another hash is stopped and started again with the changed spec.",
    )
    config_hash: Identifier = Field(
        default="",
        description="Hash of the content of the ConfigMap with which its pods are created; an attempt whose pods exist"
        " only in part is started again if this operator would create other content.",
    )
    succeeded: Annotated[str, Field(json_schema_extra={"maxLength": 4096})] = Field(
        default="",
        description="Ranks of the nodes, such as 0-3,7, that succeeded while others kept running; their pods may be"
        " removed.",
    )
    evidence: tuple[Evidence, ...] = Field(
        default=(),
        description="Evidence of the 64 most relevant nodes; after the attempt has ended, of the eight most relevant.",
        json_schema_extra=_build_list_schema(64, "nodeRank"),
    )
    evidence_summary: tuple[EvidenceSummary, ...] = Field(
        default=(),
        description="All other nodes while the attempt is stopping.",
        json_schema_extra={"maxItems": 64},
    )


class GpuSeconds(StatusModel):
    """GPU-seconds that a job spent in one phase, because of one fault."""

    phase: Annotated[str, Field(json_schema_extra={"maxLength": 64})] = Field(
        description="starting, useful, unreported, lost or stopping."
    )
    fault: Fault | None = Field(default=None, description="Fault of the failure that caused them, if there was one.")
    seconds: int = Field(description="Seconds multiplied by the number of GPUs.")


class RestartCounts(StatusModel):
    """Restarts since the job last made progress; compared with the limits of restartPolicy."""

    counted: int = Field(default=0, description="Restarts after transient, resource and unexplained failures.")
    infrastructure: int = Field(default=0, description="Restarts after infrastructure failures and preemptions.")
    best_step: int = Field(default=0, description="Highest optimizer step in the termination messages of all attempts.")


@dataclass(config=MESSAGE_CONFIG, frozen=True)
class Progress(TrainingProgress):
    """Progress of training as last reported by rank 0."""

    @field_validator("first_step_time", "update_time")
    @classmethod
    def _drop_invalid_time(cls, value: datetime | None) -> datetime | None:
        return drop_invalid_time(value)


class JobSnapshot(StatusModel):
    """What the job began with; later attempts use it too, also after an upgrade of the operator (decisions/127)."""

    operator_version: Identifier = Field(
        default="", description="Version of the operator that started the first attempt."
    )
    image: ImageReference = Field(description="Image of the pods, from spec.image or of the operator's trainer.")
    is_default_image: bool = Field(default=False, description="Whether the image is the operator's trainer image.")
    image_digest: ImageReference = Field(
        default="", description="The image with the digest that node 0 pulled; later attempts use it, if it is known."
    )
    defaults: Annotated[str, Field(json_schema_extra={"maxLength": 16_384})] = Field(
        default="", description="Defaults of spec fields as JSON."
    )
    device_table: int = Field(
        default=0, description="Version of the table of devices by which ranks per node are counted; 0: GPUs only."
    )


class BatchStatus(StatusModel):
    """Batch sizes of the attempt; with perDeviceTrainBatchSize auto, known once the trainer has chosen them."""

    per_device_train_batch_size: int = Field(description="Samples per rank and forward pass.")
    gradient_accumulation_steps: int = Field(description="Micro-batches per optimizer step and rank.")
    world_size: int = Field(description="Number of ranks.")
    effective: int = Field(description="Effective batch: number of samples per optimizer step.")


class NodeStatus(StatusModel):
    """One node of the current attempt."""

    node_rank: int = Field(description="Node rank.")
    pod_name: KubernetesName = Field(description="Name of its pod.")
    k8s_node: KubernetesName = Field(default="", description="Kubernetes node on which it runs.")
    phase: Annotated[str, Field(json_schema_extra={"maxLength": 64})] = Field(
        default="", description="Phase of its pod, or the reason why it is pending."
    )


class WaitStatus(StatusModel):
    """Reason why the pods of the attempt are not running yet."""

    reason: Identifier = Field(description="Stable CamelCase identifier.")
    message: Message = Field(default="", description="Explanation in one line.")
    since: StatusTime = Field(description="Time since which this has been the reason.")


class Display(StatusModel):
    """Formatted columns of `kubectl get`, for people."""

    nodes: str = Field(default="", description="Running and desired nodes.")
    progress: str = Field(default="", description="Percentage and steps.")
    loss: str = Field(default="", description="Training loss.")
    tokens_per_second: str = Field(default="", description="Tokens per second.")
    eta: str = Field(default="", description="Estimated remaining time.")
    queue: str = Field(default="", description="Queue, and the position in it while the job waits.")


class JobStatus(StatusModel):
    """Observed state of the job, written by the operator."""

    observed_generation: int = Field(
        default=0,
        description="metadata.generation for which this status was written; -1 before the first write.",
        json_schema_extra={"minimum": -1},
    )
    phase: Phase | None = Field(default=None, description="A one-word summary for people.")

    @field_validator("suspended_seconds")
    @classmethod
    def _limit_seconds(cls, value: int) -> int:
        """Limit the duration, because a deadline beyond the range of datetime cannot be computed."""
        return min(value, MAX_SUSPENDED_SECONDS)

    @field_validator("scheduling", mode="after")
    @classmethod
    def _ignore_unknown_provider(cls, value: SchedulingStatus | None) -> SchedulingStatus | None:
        """Ignore a provider of a newer release, so that this one chooses again."""
        return value if value is not None and value.provider in list(SchedulingProvider) else None

    @field_validator("phase", mode="before")
    @classmethod
    def _ignore_unknown_phase(cls, value: object) -> object:
        """Ignore a phase of a newer release; every pass derives the phase again."""
        return value if value in list(Phase) else None

    conditions: tuple[Condition, ...] = Field(
        default=(),
        description="Conditions: Running, Suspended, Complete, Failed, Finished, Reconciling, Stalled,"
        " Degraded, TrainerImageOutdated, OperatorRestricted.",
        json_schema_extra=_build_list_schema(16, "type"),
    )
    attempt: int | None = Field(default=None, description="Number of the current attempt.")
    attempts: tuple[AttemptRecord, ...] = Field(
        default=(),
        description="The last 20 attempts, oldest first; attempts that caused a node to be avoided are kept longer.",
        json_schema_extra=_build_list_schema(32, "attempt"),
    )
    restarts: int = Field(default=0, description="Number of restarts after failures.")
    without_progress: RestartCounts = Field(
        default=RestartCounts(), description="Restarts since the job last made progress."
    )
    start_time: StatusTime | None = Field(default=None, description="When the first attempt was started.")
    completion_time: StatusTime | None = Field(default=None, description="When the job became Complete or Failed.")
    suspended_seconds: int = Field(default=0, description="Seconds spent suspended; deadlines exclude them.")
    suspend_time: StatusTime | None = Field(default=None, description="Time since which the job has been suspended.")
    waiting: WaitStatus | None = Field(default=None, description="Why the pods of the attempt are not running yet.")
    scheduling: SchedulingStatus | None = Field(
        default=None, description="What schedules the pods of the attempt as a group; only with spec.scheduling."
    )
    snapshot: JobSnapshot | None = Field(
        default=None,
        description="What the job began with; later attempts use it too, also after an upgrade of the operator.",
    )
    progress: Progress | None = Field(default=None, description="Progress of training.")
    degraded: tuple[Degradation, ...] = Field(
        default=(),
        description="What makes the current attempt slower or less accurate than its hardware allows, at most one entry"
        " per reason.",
        json_schema_extra=_build_list_schema(MAX_DEGRADATIONS, "reason"),
    )
    gpu_seconds: tuple[GpuSeconds, ...] = Field(
        default=(),
        description="Time for which the job held GPUs, multiplied by their number, until the last status write.",
        json_schema_extra={"maxItems": MAX_GPU_SECONDS},
    )
    dropped_gpu_seconds: tuple[GpuSeconds, ...] = Field(
        default=(),
        description="The part of gpuSeconds that belongs to attempts which are no longer listed.",
        json_schema_extra={"maxItems": MAX_GPU_SECONDS},
    )
    batch: BatchStatus | None = Field(default=None, description="Batch sizes of the attempt.")
    repair: Repair | None = Field(default=None, description="Changes after an out-of-memory failure.")
    nodes: tuple[NodeStatus, ...] = Field(
        default=(),
        description="Nodes of the current attempt, at most 64: those that are not running come first.",
        json_schema_extra=_build_list_schema(MAX_LISTED_NODES, "nodeRank"),
    )
    replicas: int = Field(default=0, description="Number of existing pods of the current attempt.")
    selector: str = Field(default="", description="Label selector of the pods of the current attempt.")
    output: Message | None = Field(default=None, description="Claim and folder of the output.")
    display: Display | None = Field(default=None, description="Formatted columns of `kubectl get`.")
