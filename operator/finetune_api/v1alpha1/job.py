"""FineTuneJob v1alpha1, the definition from which CRD, reference and JSON schema are generated."""

from typing import Annotated, Any, Literal, Self

from pydantic import AwareDatetime, Field, StringConstraints, model_validator

from finetune_api.batch import BatchError, resolve_batch
from finetune_api.v1alpha1.base import Model, NonEmpty, StatusModel, list_map
from finetune_api.v1alpha1.command import Command, find_misfits
from finetune_api.v1alpha1.dataset import PACKING_REQUIRES_SFT, Dataset
from finetune_api.v1alpha1.lora import Lora
from finetune_api.v1alpha1.methods import Dpo, Sft
from finetune_api.v1alpha1.model_source import ModelSource
from finetune_api.v1alpha1.output import Output
from finetune_api.v1alpha1.parallelism import PROBE_EXCLUDES_DEEPSPEED, QUANTIZED_CANNOT_SHARD, Deepspeed, Fsdp
from finetune_api.v1alpha1.pod_types import (
    EnvVar,
    LocalObjectReference,
    PodTemplate,
    Quantity,
    ResourceRequirements,
    Volume,
)
from finetune_api.v1alpha1.quantity import parse_quantity
from finetune_api.v1alpha1.status import JobStatus
from finetune_api.v1alpha1.training import REWARD_METRICS, REWARDS_NEED_DPO, Training, frozen_rate_message
from finetune_supervisor.contract import to_camel

GROUP = "finetune.dev"
VERSION = "v1alpha1"
KIND = "FineTuneJob"
PLURAL = "finetunejobs"
MAX_JOB_NAME = 52  # <job>-<attempt, 5 digits>-<node rank, 3 digits> fits the 63 characters of a DNS label
MAX_NODES = 1000
METHODS = ("sft", "dpo")
RESERVED_ENV = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NNODES",
    "NODE_RANK",
    "NPROC_PER_NODE",
)
RESERVED_ENV_PREFIXES = ("PET_", "TORCHELASTIC_", "FINETUNE_")
RESERVED_VOLUMES = ("output", "config", "shm", "run", "tmp")
RESERVED_PATHS = ("/", "/output", "/dev", "/dev/shm", "/tmp", "/etc/finetune", "/run/finetune")  # noqa: S108


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


HANG_SECONDS = 300  # limit for one step; a sixth of the default timeout of collectives
DEFAULT_SHM_BYTES = 2 * 1024**3
MAX_MEMORY_NEEDS_LIMIT = (
    "restartPolicy.maxMemory raises resources.limits.memory, which is not set; set resources.limits.memory"
)


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
        description="Seconds of delay before the second restart, doubled each time; the first is immediate.",
    )
    max_backoff_seconds: int = Field(default=300, ge=0, le=86_400, description="Maximum delay of a restart in seconds.")
    avoid_failing_nodes: bool = Field(
        default=True,
        description="Avoid Kubernetes nodes with broken GPUs and those on which the job failed twice within a day.",
    )
    hang_timeout_seconds: int | None = Field(
        default=None,
        ge=0,
        le=86_400,
        description="Seconds without a training step after which the ranks count as hanging and are restarted; other"
        " phases have a multiple of it; 0: never. Default 300; for a command, never by default, and if set, from its"
        " first progress report on.",
    )
    max_memory: Quantity | None = Field(
        default=None,
        description="Upper bound of resources.limits.memory, which is doubled after each out-of-memory failure;"
        " absent: never raised.",
    )


class FineTuneJobSpec(Model):
    """Desired state: what to fine-tune, on how many nodes, and where to write the result."""

    model: ModelSource | None = Field(default=None, description="The model to fine-tune.")
    dataset: Dataset | None = Field(default=None, description="The rows to train on.")
    sft: Sft | None = Field(default=None, description="Supervised fine-tuning.")
    dpo: Dpo | None = Field(default=None, description="Direct preference optimization.")
    command: Command | None = Field(default=None, description="Your own program instead of the operator's trainer.")
    lora: Lora | None = Field(default=None, description="Train LoRA adapters; absent: full fine-tuning.")
    training: Training = Field(default=Training(), description="Batch, optimizer, schedule and checkpoints.")
    deepspeed: Deepspeed | None = Field(default=None, description="Shard with DeepSpeed ZeRO; absent: DDP.")
    fsdp: Fsdp | None = Field(default=None, description="Shard with FSDP2; absent: DDP.")
    num_nodes: int = Field(default=1, ge=1, le=MAX_NODES, description="Number of training nodes, one pod each.")
    nproc_per_node: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="Ranks (processes) per node (default: one per GPU in resources.limits, or 1).",
    )
    resources: ResourceRequirements = Field(
        default=ResourceRequirements(), description="Compute resources of the trainer container of each node."
    )
    shm_size: Quantity | None = Field(
        default=None,
        description="Size of /dev/shm; counts against the memory limit (default: half of it, or 2Gi without a limit).",
    )
    image: NonEmpty | None = Field(
        default=None, description="Image of the pods (default: the trainer image of the operator's release)."
    )
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        default=None, description="Image pull policy."
    )
    image_pull_secrets: tuple[LocalObjectReference, ...] = Field(
        default=(), max_length=16, description="Secrets for pulling the image.", json_schema_extra=list_map("name")
    )
    env: tuple[EnvVar, ...] = Field(
        default=(),
        max_length=128,
        description="Additional environment variables of every rank.",
        json_schema_extra=list_map("name"),
    )
    volumes: tuple[Volume, ...] = Field(
        default=(),
        max_length=32,
        description="Additional volumes, such as those with models and datasets.",
        json_schema_extra=list_map("name"),
    )
    output: Output | None = Field(default=None, description="Where checkpoints and the result are written.")
    network: Network = Field(default=Network(), description="Rendezvous port, network interface and NCCL settings.")
    restart_policy: RestartPolicy = Field(
        default=RestartPolicy(), description="Number and delay of restarts after failed attempts."
    )
    suspend: bool = Field(default=False, description="True saves a checkpoint and deletes all pods; false resumes.")
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
        " then all pods are deleted and created again after restartPolicy.maxBackoffSeconds; 0: wait without limit.",
    )
    ttl_seconds_after_finished: int | None = Field(
        default=None,
        ge=0,
        description="Seconds after its end until the job and its pods are deleted; the output is kept.",
    )
    pod_template: PodTemplate = Field(
        default=PodTemplate(), description="Settings for the pods that the operator creates."
    )

    @property
    def shards_weights(self) -> bool:
        """Whether weights are sharded over the ranks, so that no rank has all of them."""
        return self.fsdp is not None or (self.deepspeed is not None and self.deepspeed.shards_weights)

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks per node: `nprocPerNode`, else one per GPU in the limits, else 1."""
        if self.nproc_per_node is not None:
            return self.nproc_per_node
        gpus = [int(n) for name, n in self.resources.limits.items() if name.endswith("/gpu") and str(n).isdigit()]
        return max(1, sum(gpus))

    @property
    def shm_bytes(self) -> int:
        """Size of /dev/shm in bytes; half of the memory limit by default, since its contents count against it."""
        if self.shm_size is not None:
            return int(parse_quantity(self.shm_size))
        memory = self.resources.limits.get("memory")
        return DEFAULT_SHM_BYTES if memory is None else int(parse_quantity(memory) / 2)

    @property
    def hang_seconds(self) -> int:
        """Seconds without a step after which ranks count as hanging; 0 disables hang detection."""
        timeout = self.restart_policy.hang_timeout_seconds
        return timeout if timeout is not None else 0 if self.command else HANG_SECONDS

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return self.num_nodes * self.ranks_per_node

    @model_validator(mode="after")
    def _one_method(self) -> Self:
        chosen = [method for method in (*METHODS, "command") if getattr(self, method) is not None]
        if len(chosen) != 1:
            raise ValueError(f"exactly one training method must be set, such as sft: {{}}; found {len(chosen)}")
        return self

    @model_validator(mode="after")
    def _fields_fit_the_method(self) -> Self:
        given = {field for field in self.model_fields_set if getattr(self, field) is not None}
        given |= {f"output.{to_camel(field)}" for field in (self.output.model_fields_set if self.output else ())}
        if problems := find_misfits(given):
            raise ValueError("; ".join(problems))
        return self

    @model_validator(mode="after")
    def _one_sharding_backend(self) -> Self:
        if self.deepspeed is not None and self.fsdp is not None:
            raise ValueError("deepspeed and fsdp exclude each other; set one of them")
        return self

    @model_validator(mode="after")
    def _quantized_is_not_sharded(self) -> Self:
        if self.shards_weights and self.lora is not None and self.lora.quantization is not None:
            raise ValueError(QUANTIZED_CANNOT_SHARD)
        return self

    @model_validator(mode="after")
    def _probe_excludes_deepspeed(self) -> Self:
        if self.deepspeed is not None and self.training.probe:
            raise ValueError(PROBE_EXCLUDES_DEEPSPEED)
        return self

    @model_validator(mode="after")
    def _batch_is_consistent(self) -> Self:
        try:
            resolve_batch(
                per_device=self.training.per_device_train_batch_size,
                accumulation=self.training.gradient_accumulation_steps,
                effective=self.training.global_batch_size,
                world_size=self.world_size,
            )
        except BatchError as error:
            raise ValueError(f"training: {error}") from error
        return self

    @model_validator(mode="after")
    def _max_memory_exceeds_limit(self) -> Self:
        limit, max_memory = self.resources.limits.get("memory"), self.restart_policy.max_memory
        if max_memory is not None and limit is None:
            raise ValueError(MAX_MEMORY_NEEDS_LIMIT)
        if max_memory is not None and limit is not None and parse_quantity(max_memory) < parse_quantity(limit):
            raise ValueError(
                f"restartPolicy.maxMemory ({max_memory}) is less than resources.limits.memory ({limit}); raise it"
            )
        return self

    @model_validator(mode="after")
    def _volumes_are_distinct(self) -> Self:
        names = [volume.name for volume in self.volumes]
        paths = [volume.mount_path.rstrip("/") or "/" for volume in self.volumes]
        for kind, values, reserved in (("name", names, RESERVED_VOLUMES), ("mountPath", paths, RESERVED_PATHS)):
            for value in values:
                if values.count(value) > 1:
                    raise ValueError(f"volumes: {kind} {value} is used twice; give each volume its own")
                if value in reserved:
                    raise ValueError(f"volumes: {kind} {value} is reserved for the operator; choose another")
        return self

    @model_validator(mode="after")
    def _env_is_not_reserved(self) -> Self:
        names = [variable.name for variable in self.env]
        for name in names:
            if name in RESERVED_ENV or name.startswith(RESERVED_ENV_PREFIXES):
                raise ValueError(f"env: {name} is set by the operator and must not be given")
            if names.count(name) > 1:
                raise ValueError(f"env: {name} is given twice; remove one of them")
        return self

    @model_validator(mode="after")
    def _evaluation_has_rows(self) -> Self:
        if self.training.eval_steps is not None and self.dataset is not None and not self.dataset.has_evaluation:
            raise ValueError(
                "training.evalSteps is set but dataset.eval is empty; add rows to evaluate on, or set"
                " dataset.splitDatasetRatio"
            )
        return self

    @model_validator(mode="after")
    def _reward_metrics_need_dpo(self) -> Self:
        if (self.training.metric_for_best_model or "").startswith(REWARD_METRICS) and self.dpo is None:
            raise ValueError(REWARDS_NEED_DPO)
        return self

    @model_validator(mode="after")
    def _parts_with_rate_are_trained(self) -> Self:
        for part, rate in self.training.learning_rates_by_part.items():
            if rate is not None and self.model is not None and (self.model.freeze is None or part in self.model.freeze):
                raise ValueError(frozen_rate_message(part))
        return self

    @model_validator(mode="after")
    def _packing_needs_sft(self) -> Self:
        if self.dpo is not None and self.dataset is not None and self.dataset.packing:
            raise ValueError(PACKING_REQUIRES_SFT)
        return self


class TrainerSpec(FineTuneJobSpec):
    """The spec of a job that the operator's trainer runs, with the fields that only command may omit."""

    model: ModelSource
    dataset: Dataset
    output: Output


class ObjectMeta(StatusModel):
    """The fields of a job's metadata that the operator reads."""

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

    @classmethod
    def parse(cls, body: dict[str, Any]) -> Self:
        """Parse an API object or a YAML document. Raises pydantic.ValidationError."""
        return cls.model_validate(body)
