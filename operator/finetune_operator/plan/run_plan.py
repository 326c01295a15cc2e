"""Computes the run plan of an attempt, from which the manifests are built."""

import hashlib
from dataclasses import dataclass
from functools import cached_property

from finetune_api.batch import AUTO, Batch, find_batch_split, resolve_batch
from finetune_api.oom_repair import apply_repair
from finetune_api.schema.cel_rules import MUTABLE
from finetune_api.v1alpha1.job import FineTuneJob, FineTuneJobSpec
from finetune_api.v1alpha1.scheduling import API_VERSIONS, SchedulingProvider, SchedulingStatus
from finetune_operator import names
from finetune_operator.settings import Settings

# No program in a pod reads these fields. Without them, an edit of the job does not change the ConfigMap of an attempt.
_OMITTED_FIELDS = {name for name, field in FineTuneJobSpec.model_fields.items() if field.alias in MUTABLE}


@dataclass(frozen=True)
class NodePlan:
    """Rank and pod name of one node of an attempt."""

    node_rank: int
    pod_name: str


@dataclass(frozen=True)
class RunPlan:
    """Plan of one attempt, derived from the spec of the job."""

    namespace: str
    job_name: str
    job_uid: str
    attempt: int
    image: str
    supervisor: str
    cluster_domain: str
    spec: FineTuneJobSpec
    nodes: tuple[NodePlan, ...]
    defaults: str = ""  # defaults of spec fields as JSON when the job began; empty before that
    start_key: str = ""  # annotation by which the operator recognizes the pods of the attempt
    avoided_nodes: tuple[str, ...] = ()  # names of the Kubernetes nodes to avoid
    scheduling: SchedulingStatus | None = None  # what schedules the pods as a group; None if nothing does

    @property
    def nproc_per_node(self) -> int:
        """Number of ranks per node; each rank uses one GPU."""
        return self.spec.ranks_per_node

    @property
    def world_size(self) -> int:
        """Total number of ranks on all nodes."""
        return len(self.nodes) * self.nproc_per_node

    @property
    def service_name(self) -> str:
        """Name of the headless Service of the job."""
        return names.service_name(self.job_name)

    @property
    def config_map_name(self) -> str:
        """Name of the ConfigMap of this attempt."""
        return names.config_map_name(self.job_name, self.job_uid, self.attempt)

    @property
    def pod_group_name(self) -> str:
        """Name of the PodGroup of this attempt, if its provider needs one."""
        return names.pod_group_name(self.job_name, self.job_uid, self.attempt)

    @cached_property
    def config_files(self) -> dict[str, str]:
        """Text files of the ConfigMap: the user's spec and, unless the job has a command, the recorded defaults."""
        spec = self.spec.model_dump_json(by_alias=True, exclude_unset=True, exclude=_OMITTED_FIELDS)
        has_defaults = self.defaults and not self.spec.command
        return {names.CONFIG_KEY: spec, **({names.DEFAULTS_KEY: self.defaults} if has_defaults else {})}

    @cached_property
    def config_digests(self) -> dict[str, str]:
        """SHA-256 of each text file of the ConfigMap, which the supervisor verifies (decisions/310)."""
        return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in self.config_files.items()}

    @property
    def master_addr(self) -> str:
        """FQDN of node 0, whose pod resolves it from /etc/hosts before DNS has a record, unless it has hostNetwork."""
        return f"{self.nodes[0].pod_name}.{self.service_name}.{self.namespace}.svc.{self.cluster_domain}"

    @property
    def output_folder(self) -> str:
        """Folder of the job inside the claim of spec.output."""
        return (self.spec.output and self.spec.output.sub_path) or f"{self.namespace}/{self.job_name}"

    @property
    def output(self) -> str | None:
        """Output as `claim:folder`; None for a command without spec.output."""
        output = self.spec.output
        return f"{output.persistent_volume_claim.claim_name}:{self.output_folder}" if output else None

    @property
    def batch(self) -> Batch | None:
        """Batch of the spec; None for a command."""
        return resolve_planned_batch(self.spec)


def plan_run(job: FineTuneJob, *, attempt: int, settings: Settings) -> RunPlan:
    """Plan one attempt of a job, with the repair of the job applied; the result is deterministic."""
    name = job.metadata.name
    nodes = (
        NodePlan(node_rank=rank, pod_name=names.pod_name(name, attempt, rank)) for rank in range(job.spec.num_nodes)
    )
    record = next((record for record in job.status.attempts if record.attempt == attempt), None)
    return RunPlan(
        namespace=job.metadata.namespace,
        job_name=name,
        job_uid=job.metadata.uid,
        attempt=attempt,
        image=_choose_image(job, settings),
        supervisor=settings.supervisor,
        cluster_domain=settings.cluster_domain,
        spec=apply_repair(job.spec, job.status.repair),
        nodes=tuple(nodes),
        defaults=job.status.snapshot.defaults if job.status.snapshot else "",
        start_key=record.start_key if record else "",
        avoided_nodes=record.avoids if record else (),
        scheduling=_get_scheduling(job, settings),
    )


def _get_scheduling(job: FineTuneJob, settings: Settings) -> SchedulingStatus | None:
    """Return the recorded provider of the attempt; the default one if the manifests are rendered without a cluster."""
    scheduling = job.spec.scheduling
    if scheduling is None or not settings.on_cluster:
        return None
    if job.status.scheduling is not None:
        return job.status.scheduling
    default = SchedulingProvider.KUEUE if scheduling.queue_name else SchedulingProvider.POD_GROUP
    provider = scheduling.provider or default
    return SchedulingStatus(provider=provider, api_version=API_VERSIONS[provider][0])


def _choose_image(job: FineTuneJob, settings: Settings) -> str:
    """Return the image with which the job began, by digest if it is known; before that, the image for its start."""
    snapshot = job.status.snapshot
    if snapshot is None:
        return job.spec.image or settings.trainer_image
    return snapshot.image_digest or snapshot.image


def resolve_planned_batch(spec: FineTuneJobSpec) -> Batch | None:
    """Return the batch of a validated spec, the smallest possible batch for `auto`, or None for a command."""
    if spec.command is not None:
        return None
    training = spec.training
    return resolve_batch(
        micro_batch_size=training.per_device_train_batch_size,
        accumulation_steps=training.gradient_accumulation_steps,
        effective_batch=training.global_batch_size,
        world_size=spec.world_size,
    )


def resolve_chosen_batch(spec: FineTuneJobSpec, micro_batch_size: int | None) -> Batch | None:
    """Return the batch with the micro-batch size that the trainer chose for `auto`; None if that size is invalid."""
    smallest_batch = resolve_planned_batch(spec)
    assert smallest_batch is not None  # only called for a spec with `auto`, never for a command
    return find_batch_split(smallest_batch, micro_batch_size)


def describe_batch(spec: FineTuneJobSpec) -> str:
    """Describe the effective batch as a product, with `auto` for the factors that the trainer chooses."""
    batch = resolve_planned_batch(spec)
    if batch is None or not spec.training.has_auto_batch_size:
        return str(batch)
    return f"{AUTO} x {AUTO} x {batch.world_size} = {batch.effective}"
