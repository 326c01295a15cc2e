"""FineTuneJob v1alpha1: the only definition of what a user may write. CRD, reference and JSON schema come from here."""

from typing import Annotated, Any, Literal, Self

from pydantic import AwareDatetime, Field, StringConstraints, model_validator

from finetune_api.batch import BatchError, resolve_batch
from finetune_api.v1alpha1.base import Model, NonEmpty, StatusModel, list_map, to_camel
from finetune_api.v1alpha1.command import Command, misfits
from finetune_api.v1alpha1.dataset import PACKING_NEEDS_SFT, Dataset
from finetune_api.v1alpha1.lora import Lora
from finetune_api.v1alpha1.methods import Dpo, Sft
from finetune_api.v1alpha1.model_source import ModelSource
from finetune_api.v1alpha1.output import Output
from finetune_api.v1alpha1.parallelism import NO_PROBE, QUANTIZED_IS_WHOLE, Deepspeed, Fsdp
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
from finetune_api.v1alpha1.training import REWARDS, REWARDS_NEED_DPO, Training, rate_of_frozen

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
    """NCCL settings of every rank; each becomes the variable of the same name."""

    debug: Literal["VERSION", "WARN", "INFO", "TRACE"] | None = Field(default=None, description="NCCL_DEBUG.")
    ib_disable: bool | None = Field(default=None, description="NCCL_IB_DISABLE: no InfiniBand or RoCE.")
    p2p_disable: bool | None = Field(default=None, description="NCCL_P2P_DISABLE: no direct GPU to GPU copies.")
    shm_disable: bool | None = Field(default=None, description="NCCL_SHM_DISABLE: no shared memory between ranks.")
    ib_hca: Annotated[str, StringConstraints(max_length=1024)] | None = Field(
        default=None, description="NCCL_IB_HCA: which InfiniBand adapters to use."
    )
    ib_gid_index: int | None = Field(default=None, ge=0, le=255, description="NCCL_IB_GID_INDEX, for RoCE.")


class Network(Model):
    """How the ranks find and reach each other."""

    master_port: int = Field(default=29500, ge=1024, le=65535, description="Port of the rendezvous on node rank 0.")
    interface: Annotated[str, StringConstraints(pattern=r"^[=^]?[A-Za-z0-9_.,-]+$", max_length=256)] | None = Field(
        default=None, description="Network interface for gloo and NCCL (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)."
    )
    nccl: Nccl = Field(default=Nccl(), description="NCCL settings.")


HANG_SECONDS = 300  # without a step; of DDP's default limit a sixth
DEFAULT_SHM_BYTES = 2 * 1024**3
MEMORY_HAS_NO_LIMIT = "restartPolicy.maxMemory raises resources.limits.memory, which is not set; set it to begin with"


class RestartPolicy(Model):
    """How often and how patiently a failed attempt is tried again."""

    max_restarts: int = Field(
        default=3,
        ge=0,
        le=1000,
        description="Restarts after transient or unexplained failures without progress between.",
    )
    max_infrastructure_restarts: int = Field(
        default=10, ge=0, le=1000, description="Restarts after lost or preempted nodes without progress between."
    )
    backoff_seconds: int = Field(
        default=10, ge=0, le=3600, description="Delay of the second restart, doubled each time; the first is immediate."
    )
    max_backoff_seconds: int = Field(default=300, ge=0, le=86_400, description="Longest delay.")
    avoid_failing_nodes: bool = Field(
        default=True,
        description="Keep away from Kubernetes nodes with broken GPUs, and from those that failed the job twice a day.",
    )
    hang_timeout_seconds: int | None = Field(
        default=None,
        ge=0,
        le=86_400,
        description="Seconds without a training step after which ranks are taken to hang and restarted; other phases"
        " may take some times as long; 0: never. Default 300; for a command never, and if it is set, from the first"
        " progress it reports.",
    )
    max_memory: Quantity | None = Field(
        default=None,
        description="How far resources.limits.memory may be raised, doubled each time, after a node ran out of it.",
    )


class FineTuneJobSpec(Model):
    """What to fine-tune, on how many nodes, and where the result goes."""

    model: ModelSource | None = Field(default=None, description="The model to start from.")
    dataset: Dataset | None = Field(default=None, description="The rows to train on.")
    sft: Sft | None = Field(default=None, description="Supervised fine-tuning.")
    dpo: Dpo | None = Field(default=None, description="Direct preference optimisation.")
    command: Command | None = Field(default=None, description="Your own program instead of the operator's trainer.")
    lora: Lora | None = Field(default=None, description="Train LoRA adapters; absent: full fine-tuning.")
    training: Training = Field(default=Training(), description="Batch, schedule, checkpoints, seeds.")
    deepspeed: Deepspeed | None = Field(default=None, description="Spread memory with DeepSpeed; absent: DDP.")
    fsdp: Fsdp | None = Field(default=None, description="Spread memory with FSDP2; absent: DDP.")
    num_nodes: int = Field(default=1, ge=1, le=MAX_NODES, description="Training nodes, each one pod.")
    nproc_per_node: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="Processes (ranks) per node (default: one per GPU in resources.limits, or 1).",
    )
    resources: ResourceRequirements = Field(default=ResourceRequirements(), description="Resources of each node.")
    shm_size: Quantity | None = Field(
        default=None,
        description="Size of /dev/shm, part of the memory limit (default: half of it, or 2Gi where there is none).",
    )
    image: NonEmpty | None = Field(
        default=None, description="Image of the pods (default: the trainer of the operator's release)."
    )
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        default=None, description="When the image is pulled."
    )
    image_pull_secrets: tuple[LocalObjectReference, ...] = Field(
        default=(), max_length=16, description="Secrets for pulling the image.", json_schema_extra=list_map("name")
    )
    env: tuple[EnvVar, ...] = Field(
        default=(), max_length=128, description="Extra environment of every rank.", json_schema_extra=list_map("name")
    )
    volumes: tuple[Volume, ...] = Field(
        default=(), max_length=32, description="Volumes with models and datasets.", json_schema_extra=list_map("name")
    )
    output: Output | None = Field(default=None, description="Where checkpoints and the result are written.")
    network: Network = Field(default=Network(), description="Ports, interfaces and NCCL settings.")
    restart_policy: RestartPolicy = Field(default=RestartPolicy(), description="Limits and delays of restarts.")
    suspend: bool = Field(default=False, description="Save a checkpoint, release every pod and wait; false resumes.")
    active_deadline_seconds: int | None = Field(
        default=None,
        ge=1,
        description="Seconds after the first start, suspended time not counted, until the job fails.",
    )
    pending_deadline_seconds: int | None = Field(
        default=None,
        ge=1,
        description="Seconds without all nodes running, since they were last to start, until the job fails.",
    )
    startup_deadline_seconds: int = Field(
        default=600,
        ge=0,
        description="Seconds that nodes which run wait for others that cannot (no room, a quota, a missing volume);"
        " then all are released, and tried again after restartPolicy.maxBackoffSeconds; 0: never.",
    )
    ttl_seconds_after_finished: int | None = Field(
        default=None,
        ge=0,
        description="Seconds after its end until the job and its pods are deleted; the output stays.",
    )
    pod_template: PodTemplate = Field(default=PodTemplate(), description="Placement, identity and labels of the pods.")

    @property
    def spreads_weights(self) -> bool:
        """Over the ranks, so that none has them whole."""
        return self.fsdp is not None or (self.deepspeed is not None and self.deepspeed.spreads_weights)

    @property
    def ranks_per_node(self) -> int:
        """`nprocPerNode`, or one process per GPU of the limits, or 1."""
        if self.nproc_per_node is not None:
            return self.nproc_per_node
        gpus = [int(n) for name, n in self.resources.limits.items() if name.endswith("/gpu") and str(n).isdigit()]
        return max(1, sum(gpus))

    @property
    def shm_bytes(self) -> int:
        """Size of /dev/shm: what is written there counts against the memory limit, so it gets half of that."""
        if self.shm_size is not None:
            return int(parse_quantity(self.shm_size))
        memory = self.resources.limits.get("memory")
        return DEFAULT_SHM_BYTES if memory is None else int(parse_quantity(memory) / 2)

    @property
    def hang_seconds(self) -> int:
        """After which silent ranks are taken to hang; 0: never."""
        asked = self.restart_policy.hang_timeout_seconds
        return asked if asked is not None else 0 if self.command else HANG_SECONDS

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return self.num_nodes * self.ranks_per_node

    @model_validator(mode="after")
    def _one_method(self) -> Self:
        chosen = [method for method in (*METHODS, "command") if getattr(self, method) is not None]
        if len(chosen) != 1:
            raise ValueError(f"exactly one training method must be set, such as sft: {{}}; found {len(chosen)}")
        return self

    @model_validator(mode="after")
    def _fits_the_method(self) -> Self:
        given = {field for field in self.model_fields_set if getattr(self, field) is not None}
        given |= {f"output.{to_camel(field)}" for field in (self.output.model_fields_set if self.output else ())}
        if problems := misfits(given):
            raise ValueError("; ".join(problems))
        return self

    @model_validator(mode="after")
    def _one_way_to_spread(self) -> Self:
        if self.deepspeed is not None and self.fsdp is not None:
            raise ValueError("deepspeed and fsdp exclude each other; set one of them")
        return self

    @model_validator(mode="after")
    def _quantized_is_whole(self) -> Self:
        if self.spreads_weights and self.lora is not None and self.lora.quantization is not None:
            raise ValueError(QUANTIZED_IS_WHOLE)
        return self

    @model_validator(mode="after")
    def _probe_can_be_undone(self) -> Self:
        if self.deepspeed is not None and self.training.probe:
            raise ValueError(NO_PROBE)
        return self

    @model_validator(mode="after")
    def _batch_holds(self) -> Self:
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
    def _memory_can_grow(self) -> Self:
        limit, most = self.resources.limits.get("memory"), self.restart_policy.max_memory
        if most is not None and limit is None:
            raise ValueError(MEMORY_HAS_NO_LIMIT)
        if most is not None and limit is not None and parse_quantity(most) < parse_quantity(limit):
            raise ValueError(
                f"restartPolicy.maxMemory ({most}) is less than resources.limits.memory ({limit}); raise it"
            )
        return self

    @model_validator(mode="after")
    def _volumes_are_apart(self) -> Self:
        names = [volume.name for volume in self.volumes]
        paths = [volume.mount_path.rstrip("/") or "/" for volume in self.volumes]
        for kind, found, reserved in (("name", names, RESERVED_VOLUMES), ("mountPath", paths, RESERVED_PATHS)):
            for value in found:
                if found.count(value) > 1:
                    raise ValueError(f"volumes: {kind} {value} is used twice; give each volume its own")
                if value in reserved:
                    raise ValueError(f"volumes: {kind} {value} is the operator's own; choose another")
        return self

    @model_validator(mode="after")
    def _env_is_not_ours(self) -> Self:
        names = [variable.name for variable in self.env]
        for name in names:
            if name in RESERVED_ENV or name.startswith(RESERVED_ENV_PREFIXES):
                raise ValueError(f"env: {name} is set by the operator and cannot be given")
            if names.count(name) > 1:
                raise ValueError(f"env: {name} is given twice; leave one of them out")
        return self

    @model_validator(mode="after")
    def _evaluation_has_rows(self) -> Self:
        if self.training.eval_steps is not None and self.dataset is not None and not self.dataset.evaluates:
            raise ValueError(
                "training.evalSteps is set but dataset.eval is empty; add rows to evaluate on, or set"
                " dataset.splitDatasetRatio"
            )
        return self

    @model_validator(mode="after")
    def _rewards_are_measured(self) -> Self:
        if (self.training.metric_for_best_model or "").startswith(REWARDS) and self.dpo is None:
            raise ValueError(REWARDS_NEED_DPO)
        return self

    @model_validator(mode="after")
    def _what_has_a_rate_is_trained(self) -> Self:
        for part, rate in self.training.rates_of_parts.items():
            if rate is not None and self.model is not None and (self.model.freeze is None or part in self.model.freeze):
                raise ValueError(rate_of_frozen(part))
        return self

    @model_validator(mode="after")
    def _packs_are_for_sft(self) -> Self:
        if self.dpo is not None and self.dataset is not None and self.dataset.packing:
            raise ValueError(PACKING_NEEDS_SFT)
        return self


class TrainerSpec(FineTuneJobSpec):
    """The spec of a job that the operator's own trainer runs: it has what only command goes without."""

    model: ModelSource
    dataset: Dataset
    output: Output


class ObjectMeta(StatusModel):
    """The metadata of a job that the operator reads."""

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
    """One job: what the user wants (spec) and what is (status)."""

    metadata: ObjectMeta
    spec: FineTuneJobSpec
    status: JobStatus = JobStatus()

    @classmethod
    def parse(cls, body: dict[str, Any]) -> Self:
        """From an API object or a YAML document; raises pydantic.ValidationError."""
        return cls.model_validate(body)
