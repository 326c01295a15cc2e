"""Defines the subset of the Kubernetes pod API that the operator copies from a job to its pods."""

import re
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints

from finetune_api.v1alpha1.base import (
    CelRule,
    CrossFieldRule,
    Model,
    ModelWithRules,
    build_list_map_schema,
    build_validation_schema,
)
from finetune_api.v1alpha1.kubernetes_types import (
    Affinity,
    ConfigMapSource,
    EmptyDirSource,
    EnvVarSource,
    HostPathSource,
    ImageSource,
    NfsSource,
    PodSecurityContext,
    SecretSource,
    SecurityContext,
)
from finetune_api.v1alpha1.name_types import DnsLabel, ObjectName
from finetune_api.v1alpha1.placement_types import (
    ContainerResourceClaim,
    PodResourceClaim,
    SchedulingGate,
    TopologySpreadConstraint,
    find_duplicate,
)
from finetune_supervisor.contract import to_camel

RESERVED_PREFIX = "finetune.dev"
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
VOLUME_SOURCES = ("persistent_volume_claim", "config_map", "secret", "empty_dir", "nfs", "image", "host_path")


def _reject_dot_dot(path: str) -> str:
    if ".." in path.split("/"):
        raise ValueError(f"{path}: must not contain '..'")
    return path


def _reject_non_quantity(value: str | int) -> str | int:
    if not re.fullmatch(r"([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,2})?", str(value)):
        raise ValueError(f"{value}: must be a quantity such as 4, 500m or 64Gi")
    return value


EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=256)]
AbsolutePath = Annotated[str, StringConstraints(pattern=r"^/[^:]*$", max_length=1024)]
RelativePath = Annotated[
    str,
    StringConstraints(pattern=r"^[^/]+(/[^/]+)*$", max_length=512),
    AfterValidator(_reject_dot_dot),
    Field(
        json_schema_extra=build_validation_schema(
            [CelRule("!self.split('/').exists(p, p == '..')", "must not contain '..'")]
        )
    ),
]
Quantity = Annotated[
    str | int,
    AfterValidator(_reject_non_quantity),
    Field(
        json_schema_extra={
            "x-kubernetes-int-or-string": True,
            "maxLength": 64,
            **build_validation_schema(
                [
                    CelRule(
                        "type(self) == int ? self >= 0 : isQuantity(self) && !self.startsWith('-')",
                        "must be a quantity such as 4, 500m or 64Gi",
                    )
                ]
            ),
        }
    ),
]
FreeFormObject = Annotated[
    dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True, "maxProperties": 64})
]
Labels = Annotated[dict[str, Annotated[str, StringConstraints(max_length=4096)]], Field(max_length=64)]
SchedulerName = Annotated[str, StringConstraints(min_length=1, max_length=253)]  # any text, as in a pod


class ResourceRequirements(Model):
    """Compute resources of the trainer container of each node, as in a pod."""

    limits: dict[str, Quantity] = Field(
        default={}, max_length=12, description="Resource limits, such as nvidia.com/gpu."
    )
    requests: dict[str, Quantity] = Field(
        default={}, max_length=12, description="Resources that the scheduler reserves."
    )
    claims: tuple[ContainerResourceClaim, ...] = Field(
        default=(),
        max_length=8,
        description="Claims in podTemplate.resourceClaims whose devices the container uses; nprocPerNode is then"
        " required, unless limits contain a known device.",
        json_schema_extra=build_list_map_schema("name"),
    )

    def with_memory_limit(self, limit: str) -> Self:
        """Return a copy with this memory limit; a memory request equal to the old limit is raised as well."""
        is_equal = "memory" in self.requests and self.requests["memory"] == self.limits.get("memory")
        requests = {**self.requests, "memory": limit} if is_equal else self.requests
        return self.model_copy(update={"limits": {**self.limits, "memory": limit}, "requests": requests})


class EnvVar(Model):
    """One environment variable of the trainer container."""

    name: EnvName = Field(description="Name of the variable.")
    value: str | None = Field(default=None, max_length=32768, description="Literal value.")
    value_from: EnvVarSource | None = Field(
        default=None, description="Source of the value (secretKeyRef, configMapKeyRef, fieldRef), as in a pod."
    )


class LocalObjectReference(Model):
    """A reference to an object in the same namespace."""

    name: ObjectName = Field(description="Name of the object.")


class PersistentVolumeClaimSource(Model):
    """A PersistentVolumeClaim in the job's namespace."""

    claim_name: ObjectName = Field(description="Name of the PersistentVolumeClaim.")


def _check_source_count(volume: "Volume") -> str | None:
    sources = [to_camel(name) for name in VOLUME_SOURCES if getattr(volume, name) is not None]
    if len(sources) == 1:
        return None
    return f"volume {volume.name}: exactly one source must be set; found {', '.join(sources) or 'none'}"


class Volume(ModelWithRules):
    """A volume with exactly one source, and its mount path."""

    name: DnsLabel = Field(description="Name of the volume, unique within the job.")
    mount_path: AbsolutePath = Field(description="Absolute path in the trainer container.")
    sub_path: RelativePath | None = Field(
        default=None, description="Folder inside the volume to mount instead of its root."
    )
    read_only: bool = Field(default=False, description="Mount read-only.")
    persistent_volume_claim: PersistentVolumeClaimSource | None = Field(
        default=None, description="A PersistentVolumeClaim in the job's namespace."
    )
    config_map: ConfigMapSource | None = Field(default=None, description="A ConfigMap source, as in a pod.")
    secret: SecretSource | None = Field(default=None, description="A Secret source, as in a pod.")
    empty_dir: EmptyDirSource | None = Field(default=None, description="An emptyDir source, as in a pod.")
    nfs: NfsSource | None = Field(default=None, description="An NFS source, as in a pod.")
    image: ImageSource | None = Field(
        default=None,
        description="The files of an OCI image or artifact, as in a pod; always read-only. Needs Kubernetes 1.36, or"
        " the feature gate ImageVolume.",
    )
    host_path: HostPathSource | None = Field(
        default=None, description="A hostPath source, as in a pod; the restricted pod security level rejects it."
    )

    rules: ClassVar[tuple[CrossFieldRule["Volume"], ...]] = (
        CrossFieldRule(
            "one source",
            _check_source_count,
            (
                CelRule(
                    f"[{', '.join(f'has(self.{to_camel(name)})' for name in VOLUME_SOURCES)}].exists_one(x, x)",
                    f"exactly one volume source must be set: {', '.join(map(to_camel, VOLUME_SOURCES))}",
                ),
            ),
        ),
    )


class Toleration(Model):
    """A toleration of the job's pods, as in a pod."""

    key: str | None = Field(default=None, max_length=317, description="Taint key; empty matches all keys.")
    operator: Literal["Exists", "Equal", "Lt", "Gt"] | None = Field(
        default=None, description="Comparison with the value of the taint."
    )
    value: str | None = Field(default=None, max_length=63, description="Taint value.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        default=None, description="Taint effect; empty matches all effects."
    )
    toleration_seconds: int | None = Field(
        default=None, description="Seconds for which a NoExecute taint is tolerated."
    )


def _find_reserved_key(template: "PodTemplate") -> str | None:
    for field, keys in (("labels", template.labels), ("annotations", template.annotations)):
        for key in keys:
            if key.split("/")[0].endswith(RESERVED_PREFIX):
                return f"podTemplate.{field}: {key} is reserved for the operator; choose another prefix"
    return None


def _find_repeated_item(template: "PodTemplate") -> str | None:
    spreads = (f"{spread.topology_key}, {spread.when_unsatisfiable}" for spread in template.topology_spread_constraints)
    for field, keys in (
        ("schedulingGates", (gate.name for gate in template.scheduling_gates)),
        ("resourceClaims", (claim.name for claim in template.resource_claims)),
        ("topologySpreadConstraints", spreads),
    ):
        if duplicate := find_duplicate(keys):
            return f"podTemplate.{field}: {duplicate} is given twice; remove one of them"
    return None


class PodTemplate(ModelWithRules):
    """Settings for the pods that the operator creates: placement, identity, labels and security."""

    labels: Labels = Field(default={}, description="Extra labels; finetune.dev/ is reserved.")
    annotations: Labels = Field(default={}, description="Extra annotations; finetune.dev/ is reserved.")
    node_selector: Labels = Field(default={}, description="Labels that a Kubernetes node must have.")
    tolerations: tuple[Toleration, ...] = Field(default=(), max_length=32, description="Tolerations of the pods.")
    affinity: Affinity | None = Field(default=None, description="Affinity, as in a pod.")
    priority_class_name: ObjectName | None = Field(default=None, description="PriorityClass of the pods.")
    scheduler_name: SchedulerName | None = Field(default=None, description="Scheduler to use instead of the default.")
    runtime_class_name: ObjectName | None = Field(default=None, description="RuntimeClass, such as nvidia.")
    service_account_name: ObjectName | None = Field(
        default=None, description="ServiceAccount of the pods; its token is not mounted."
    )
    security_context: PodSecurityContext | None = Field(
        default=None, description="Replaces the pod's securityContext (default: non-root 1000, seccomp RuntimeDefault)."
    )
    container_security_context: SecurityContext | None = Field(
        default=None,
        description="Replaces the container's securityContext (default: no capabilities), e.g. for IPC_LOCK.",
    )
    scheduling_gates: tuple[SchedulingGate, ...] = Field(
        default=(),
        max_length=16,
        description="Gates of other controllers; the pods are scheduled once all are removed.",
        json_schema_extra=build_list_map_schema("name"),
    )
    host_network: bool = Field(
        default=False,
        description="Use the network of the Kubernetes node, e.g. for RoCE. The ranks then listen on network.masterPort"
        " and the port after it, on every address of the node; the baseline pod security level rejects such pods.",
    )
    resource_claims: tuple[PodResourceClaim, ...] = Field(
        default=(),
        max_length=8,
        description="ResourceClaims of each pod; resources.claims makes their devices available to the trainer.",
        json_schema_extra=build_list_map_schema("name"),
    )
    topology_spread_constraints: tuple[TopologySpreadConstraint, ...] = Field(
        default=(),
        max_length=8,
        description="Replaces the operator's constraint, which prefers different Kubernetes nodes for the pods.",
        json_schema_extra=build_list_map_schema("topologyKey", "whenUnsatisfiable"),
    )

    rules: ClassVar[tuple[CrossFieldRule["PodTemplate"], ...]] = (
        CrossFieldRule(
            "labels and annotations are not reserved",
            _find_reserved_key,
            cel_limitations="all, because SPEC_RULES has the CEL rules, which contain the field in their message",
        ),
        CrossFieldRule(
            "gates, claims and spread constraints are distinct",
            _find_repeated_item,
            cel_limitations="all, because the keys of the lists are distinct, which the API server compares",
        ),
    )
