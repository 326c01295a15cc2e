"""plan_run: what one attempt of a job looks like, before any Kubernetes object is spelled out."""

from dataclasses import dataclass

from finetune_api.batch import AUTO, Batch, resolve_batch, split_by
from finetune_api.oom_repair import apply_repair
from finetune_api.v1alpha1.job import FineTuneJob, FineTuneJobSpec
from finetune_operator import names


@dataclass(frozen=True)
class Settings:
    """What the installation decides for all jobs."""

    trainer_image: str
    supervisor: str = ""  # for images of users, which do without where nothing is made of a plan
    cluster_domain: str = "cluster.local"
    on_cluster: bool = True  # nodes are pods, whose limits can be raised, and there are other machines to go to


@dataclass(frozen=True)
class NodePlan:
    """One node, which is one pod."""

    node_rank: int
    pod_name: str


@dataclass(frozen=True)
class RunPlan:
    """One attempt; every derived number is a property, so that nobody computes it twice."""

    namespace: str
    job_name: str
    job_uid: str
    attempt: int
    image: str
    supervisor: str
    cluster_domain: str
    spec: FineTuneJobSpec
    nodes: tuple[NodePlan, ...]
    avoids: tuple[str, ...] = ()  # Kubernetes nodes

    @property
    def nproc_per_node(self) -> int:
        return self.spec.ranks_per_node

    @property
    def world_size(self) -> int:
        return len(self.nodes) * self.nproc_per_node

    @property
    def service_name(self) -> str:
        return names.service_name(self.job_name)

    @property
    def config_map_name(self) -> str:
        return names.config_map_name(self.job_name, self.attempt)

    @property
    def master_addr(self) -> str:
        """FQDN of node rank 0, which that pod resolves from its own /etc/hosts before DNS knows it."""
        return f"{self.nodes[0].pod_name}.{self.service_name}.{self.namespace}.svc.{self.cluster_domain}"

    @property
    def output_folder(self) -> str:
        """Folder of the job inside the output claim."""
        return (self.spec.output and self.spec.output.sub_path) or f"{self.namespace}/{self.job_name}"

    @property
    def output(self) -> str | None:
        """`claim:folder`; None for a command that asked for none."""
        output = self.spec.output
        return f"{output.persistent_volume_claim.claim_name}:{self.output_folder}" if output else None

    @property
    def batch(self) -> Batch | None:
        return batch_of(self.spec)


def plan_run(job: FineTuneJob, *, attempt: int, settings: Settings) -> RunPlan:
    """Plan attempt number `attempt` of a job, with what was changed to make it fit. Same arguments, same plan."""
    name = job.metadata.name
    nodes = (
        NodePlan(node_rank=rank, pod_name=names.pod_name(name, attempt, rank)) for rank in range(job.spec.num_nodes)
    )
    return RunPlan(
        namespace=job.metadata.namespace,
        job_name=name,
        job_uid=job.metadata.uid,
        attempt=attempt,
        image=job.spec.image or settings.trainer_image,
        supervisor=settings.supervisor,
        cluster_domain=settings.cluster_domain,
        spec=apply_repair(job.spec, job.status.repair),
        nodes=tuple(nodes),
        avoids=next((record.avoids for record in job.status.attempts if record.attempt == attempt), ()),
    )


def batch_of(spec: FineTuneJobSpec) -> Batch | None:
    """The batch of a validated spec, with auto its smallest; what a command makes of its rows nobody knows."""
    if spec.command is not None:
        return None
    training = spec.training
    return resolve_batch(
        per_device=training.per_device_train_batch_size,
        accumulation=training.gradient_accumulation_steps,
        effective=training.global_batch_size,
        world_size=spec.world_size,
    )


def chosen_batch(spec: FineTuneJobSpec, per_device: int | None) -> Batch | None:
    """What auto came to be, as the trainer says; None for what it cannot have chosen."""
    smallest = batch_of(spec)
    assert smallest is not None  # who asks has a job that chooses
    return split_by(smallest, per_device)


def describe_batch(spec: FineTuneJobSpec) -> str:
    """As a product, before the trainer has chosen anything."""
    batch = batch_of(spec)
    if batch is None or not spec.training.chooses_batch:
        return str(batch)
    return f"{AUTO} x {AUTO} x {batch.world_size} = {batch.effective}"
