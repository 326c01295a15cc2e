"""Defines the FineTuneJob resource, from which CRD, reference and JSON schema are generated."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AwareDatetime, Field, StringConstraints, field_validator

from finetune_api.v1alpha1.base import (
    BEGUN_JOB,
    CelRule,
    CrossFieldRule,
    Model,
    ModelWithRules,
    NonEmpty,
    StatusModel,
    build_list_map_schema,
    build_validation_schema,
)
from finetune_api.v1alpha1.command import Command
from finetune_api.v1alpha1.dataset import Dataset
from finetune_api.v1alpha1.devices import count_devices
from finetune_api.v1alpha1.lora import Lora
from finetune_api.v1alpha1.methods import Dpo, Sft
from finetune_api.v1alpha1.model_source import ModelSource
from finetune_api.v1alpha1.output import Output
from finetune_api.v1alpha1.parallelism import Deepspeed, Fsdp
from finetune_api.v1alpha1.pod_types import (
    EnvVar,
    LocalObjectReference,
    PodTemplate,
    Quantity,
    ResourceRequirements,
    Volume,
)
from finetune_api.v1alpha1.quantity import parse_quantity
from finetune_api.v1alpha1.recorded_defaults import apply_defaults
from finetune_api.v1alpha1.scheduling import Scheduling
from finetune_api.v1alpha1.spec_rules import SPEC_RULES
from finetune_api.v1alpha1.status import JobStatus
from finetune_api.v1alpha1.training import Training
from finetune_supervisor.contract import DEFAULT_STATUS_PORT

GROUP = "finetune.dev"
VERSION = "v1alpha1"
KIND = "FineTuneJob"
PLURAL = "finetunejobs"
MAX_JOB_NAME = 52  # so that pod names `<job>-<5-digit attempt>-<3-digit node rank>` have at most 63 characters
MAX_NODES = 1000
MAX_SECONDS = 10**11


# A rule of the list itself: the API server skips it for stored jobs as long as their list is unchanged.
ENV_SIZE_RULE = CelRule(
    "self.map(e, has(e.value) ? e.value.size() : 0).sum() <= 65536",
    "the values of all variables must have at most 65536 characters; put large values into a ConfigMap",
)


class Nccl(Model):
    """NCCL settings of every rank; each sets the environment variable of the same name."""

    debug: Literal["VERSION", "WARN", "INFO", "TRACE"] | None = Field(
        default=None, description="NCCL_DEBUG: log level."
    )
    ib_disable: bool | None = Field(default=None, description="NCCL_IB_DISABLE: do not use InfiniBand or RoCE.")
    p2p_disable: bool | None = Field(default=None, description="NCCL_P2P_DISABLE: do not copy directly between GPUs.")
    shm_disable: bool | None = Field(
        default=None, description="NCCL_SHM_DISABLE: do not use shared memory between ranks."
    )
    ib_hca: Annotated[str, StringConstraints(max_length=1024)] | None = Field(
        default=None, description="NCCL_IB_HCA: InfiniBand adapters to use."
    )
    ib_gid_index: int | None = Field(default=None, ge=0, le=255, description="NCCL_IB_GID_INDEX: GID index for RoCE.")


class Network(Model):
    """Rendezvous port, network interface and NCCL settings of the ranks."""

    master_port: int = Field(default=29500, ge=1024, le=65535, description="Rendezvous port on node rank 0.")
    interface: Annotated[str, StringConstraints(pattern=r"^[=^]?[A-Za-z0-9_.,-]+$", max_length=256)] | None = Field(
        default=None, description="Network interface of gloo and NCCL (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)."
    )
    nccl: Nccl = Field(default=Nccl(), description="NCCL settings.")


HANG_SECONDS = 300  # default time limit of one step; one sixth of the default ddpTimeout
GRACE_SECONDS, MAX_GRACE_SECONDS = 120, 86_400  # default and limit of terminationGracePeriodSeconds


class RestartPolicy(Model):
    """Number and delay of restarts after failed attempts, and limits of repairs."""

    max_restarts: int = Field(
        default=3,
        ge=0,
        le=1000,
        description="Maximum consecutive restarts without progress after transient or unexplained failures.",
    )
    max_infrastructure_restarts: int = Field(
        default=10,
        ge=0,
        le=1000,
        description="Maximum consecutive restarts without progress after infrastructure failures and preemptions.",
    )
    backoff_seconds: int = Field(
        default=10,
        ge=0,
        le=3600,
        description="Delay in seconds before the second restart, doubled for each further one; the first is immediate.",
    )
    max_backoff_seconds: int = Field(
        default=300,
        ge=0,
        le=86_400,
        description="Maximum delay of a restart in seconds, before the jitter of up to 20 %.",
    )
    avoid_failing_nodes: bool = Field(
        default=True,
        description="Avoid Kubernetes nodes with broken GPUs and those on which the job failed twice within a day.",
    )
    hang_timeout_seconds: int | None = Field(
        default=None,
        ge=0,
        le=86_400,
        description="Seconds without a completed step after which ranks are considered hung and are restarted; 0"
        " disables hang detection. Other phases have a multiple of this limit. Default: 300, or 0 for a command. For a"
        " command, the limit applies only after its first progress report.",
    )
    max_memory: Quantity | None = Field(
        default=None,
        description="Upper bound of resources.limits.memory, which is doubled after each out-of-memory failure;"
        " absent: never raised.",
    )


class FineTuneJobSpec(ModelWithRules):
    """Desired state: what to fine-tune, on how many nodes, and where to write the result."""

    model: ModelSource | None = Field(default=None, description="The model to fine-tune.")
    dataset: Dataset | None = Field(default=None, description="The rows to train on.")
    sft: Sft | None = Field(default=None, description="Supervised fine-tuning.")
    dpo: Dpo | None = Field(default=None, description="Direct preference optimization.")
    command: Command | None = Field(
        default=None, description="Runs your own program instead of the operator's trainer."
    )
    lora: Lora | None = Field(default=None, description="Train LoRA adapters; absent: full fine-tuning.")
    training: Training = Field(default=Training(), description="Batch, optimizer, schedule and checkpoints.")
    deepspeed: Deepspeed | None = Field(default=None, description="Shard with DeepSpeed ZeRO; absent: DDP.")
    fsdp: Fsdp | None = Field(default=None, description="Shard with FSDP2; absent: DDP.")
    num_nodes: int = Field(default=1, ge=1, le=MAX_NODES, description="Number of training nodes, one pod each.")
    nproc_per_node: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="Ranks (processes) per node (default: one per GPU or other known device in resources.limits, or 1);"
        " required with a device of an unknown kind, and if devices come from podTemplate.resourceClaims only.",
    )
    resources: ResourceRequirements = Field(
        default=ResourceRequirements(), description="Compute resources of the trainer container of each node."
    )
    shm_size: Quantity | None = Field(
        default=None,
        description="Size of /dev/shm; counts against the memory limit (default: half of it; without a limit, the"
        " memory of the Kubernetes node).",
    )
    image: NonEmpty | None = Field(
        default=None, description="Image of the pods (default: the trainer image of the operator's release)."
    )
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        default=None, description="Image pull policy."
    )
    image_pull_secrets: tuple[LocalObjectReference, ...] = Field(
        default=(),
        max_length=16,
        description="Secrets for pulling the image.",
        json_schema_extra=build_list_map_schema("name"),
    )
    env: tuple[EnvVar, ...] = Field(
        default=(),
        max_length=128,
        description="Additional environment variables of every rank, with at most 65536 characters in all values.",
        json_schema_extra={**build_list_map_schema("name"), **build_validation_schema([ENV_SIZE_RULE])},
    )
    volumes: tuple[Volume, ...] = Field(
        default=(),
        max_length=32,
        description="Additional volumes, such as those with models and datasets.",
        json_schema_extra=build_list_map_schema("name"),
    )
    output: Output | None = Field(default=None, description="Location of checkpoints and the result.")
    network: Network = Field(default=Network(), description="Rendezvous port, network interface and NCCL settings.")
    restart_policy: RestartPolicy = Field(
        default=RestartPolicy(), description="Number and delay of restarts after failed attempts."
    )
    suspend: bool = Field(default=False, description="True saves a checkpoint and deletes all pods; false resumes.")
    cancel: bool = Field(
        default=False,
        description="True saves a checkpoint, deletes all pods and ends the job for good: it fails with Cancelled.",
    )
    active_deadline_seconds: int | None = Field(
        default=None,
        ge=1,
        description="Seconds after its start until the job fails, excluding suspended time.",
    )
    pending_deadline_seconds: int | None = Field(
        default=None,
        ge=1,
        description="Seconds without all nodes running, since the attempt was last started, until the job fails.",
    )
    startup_deadline_seconds: int = Field(
        default=600,
        ge=0,
        description="Seconds that running nodes wait for others that cannot start (capacity, quota, missing volume);"
        " then all pods are deleted, and created again after restartPolicy.maxBackoffSeconds, at least 5 seconds;"
        " 0: wait without limit.",
    )
    termination_grace_period_seconds: int = Field(
        default=GRACE_SECONDS,
        ge=30,
        le=MAX_GRACE_SECONDS,
        description="Seconds between SIGTERM and SIGKILL when pods are stopped, in which the ranks finish their step"
        " and save a checkpoint.",
    )
    ttl_seconds_after_finished: int | None = Field(
        default=None,
        ge=0,
        description="Seconds after which a finished job and its pods are deleted; the output is kept.",
    )
    pod_template: PodTemplate = Field(
        default=PodTemplate(), description="Settings for the pods that the operator creates."
    )
    scheduling: Scheduling | None = Field(
        default=None, description="Queue and placement of the pods as a group; absent: the pods are scheduled at once."
    )

    rules: ClassVar[tuple[CrossFieldRule[Any], ...]] = SPEC_RULES

    @field_validator(
        "active_deadline_seconds", "pending_deadline_seconds", "startup_deadline_seconds", "ttl_seconds_after_finished"
    )
    @classmethod
    def _limit_seconds(cls, value: int | None) -> int | None:
        """Limit durations to 3,170 years, because later times exceed the range of datetime."""
        return None if value is None else min(value, MAX_SECONDS)

    @property
    def shards_weights(self) -> bool:
        """Whether weights are sharded across the ranks."""
        return self.fsdp is not None or (self.deepspeed is not None and self.deepspeed.shards_weights)

    @property
    def ranks_per_node(self) -> int:
        """Ranks per node: `nprocPerNode`, otherwise one per compute device in the limits, otherwise 1."""
        if self.nproc_per_node is not None:
            return self.nproc_per_node
        return max(1, self.gpus_per_node)

    @property
    def gpus_per_node(self) -> int:
        """GPUs and other known compute devices in the limits of a node; 0 for a job that uses none."""
        return count_devices(self.resources.limits)

    @property
    def status_port(self) -> int:
        """Port of the status server of each node.

        On the network of the Kubernetes node it is the one after masterPort, so that one field separates two jobs.
        """
        return self.network.master_port + 1 if self.pod_template.host_network else DEFAULT_STATUS_PORT

    @property
    def shm_bytes(self) -> int | None:
        """Size of /dev/shm in bytes; by default half of the memory limit, because the limit includes its contents.

        None without a memory limit: then the kubelet limits it to the memory of the Kubernetes node.
        """
        if self.shm_size is not None:
            return int(parse_quantity(self.shm_size))
        memory = self.resources.limits.get("memory")
        return None if memory is None else int(parse_quantity(memory) / 2)

    @property
    def hang_seconds(self) -> int:
        """Seconds without a completed step after which a rank is considered hung; 0 disables hang detection."""
        timeout = self.restart_policy.hang_timeout_seconds
        return timeout if timeout is not None else 0 if self.command else HANG_SECONDS

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return self.num_nodes * self.ranks_per_node


class TrainerSpec(FineTuneJobSpec):
    """Spec of a job without a command; model, dataset and output are required."""

    model: ModelSource
    dataset: Dataset
    output: Output


class ObjectMeta(StatusModel):
    """Metadata fields of a job that the operator reads."""

    name: str
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    creation_timestamp: AwareDatetime | None = None
    deletion_timestamp: AwareDatetime | None = None
    labels: dict[str, str] = Field(default={})
    annotations: dict[str, str] = Field(default={})


class FineTuneJob(StatusModel):
    """A fine-tuning job with its desired state (spec) and observed state (status)."""

    metadata: ObjectMeta
    spec: FineTuneJobSpec
    status: JobStatus = JobStatus()

    @property
    def num_attempt_nodes(self) -> int:
        """Number of nodes of the current attempt until it ends, otherwise spec.numNodes."""
        for record in self.status.attempts[-1:]:
            if record.end_time is None and record.num_nodes is not None:
                return record.num_nodes
        return self.spec.num_nodes

    @classmethod
    def parse(cls, body: dict[str, Any]) -> Self:
        """Parse a job that the API server has accepted, ignoring fields of a newer CRD.

        Unset fields get the defaults of the release that started the job. A begun job keeps the names of its objects.

        Raises: pydantic.ValidationError if a known field is invalid.
        """
        status = body.get("status")
        has_begun = isinstance(status, dict) and bool(status.get("attempts"))
        job = cls.model_validate(body, extra="ignore", context=BEGUN_JOB if has_begun else None)
        if job.status.snapshot is None:
            return job
        return job.model_copy(update={"spec": apply_defaults(job.spec, job.status.snapshot.defaults)})
