"""Command `finetune plan`, which prints the objects that the operator would create for the first attempt."""

import sys
from enum import StrEnum
from importlib import metadata
from typing import TYPE_CHECKING, Annotated

import typer

from finetune_api.learning_rates import resolve_learning_rates
from finetune_api.yaml_documents import dump_yaml
from finetune_cli.job_file import FileArgument, JobFile, NamespaceOption, read_job_file
from finetune_operator import names
from finetune_operator.plan.device_summary import describe_devices
from finetune_operator.plan.manifests import build_children
from finetune_operator.plan.pod_group import build_pod_group
from finetune_operator.plan.run_plan import RunPlan, describe_batch, plan_run
from finetune_operator.settings import Settings

if TYPE_CHECKING:
    from finetune_api.v1alpha1.job import FineTuneJob

PLACEHOLDER_UID = "00000000-0000-0000-0000-000000000000"  # in a cluster, the API server assigns the uid
BATCH_FACTORS = "per device x accumulation x ranks"
TRAINER_REPOSITORY = "ghcr.io/finetune-operator/trainer"


class PlanFormat(StrEnum):
    """Output formats of the command `finetune plan`."""

    YAML = "yaml"
    SUMMARY = "summary"


TrainerImage = Annotated[
    str | None,
    typer.Option(
        "--trainer-image",
        help="Image of jobs without spec.image, as configured in the operator (default: of this release).",
    ),
]


def plan(
    file: FileArgument,
    namespace: NamespaceOption = None,
    output: Annotated[PlanFormat, typer.Option("--output", "-o", help="What to print on stdout.")] = PlanFormat.YAML,
    trainer_image: TrainerImage = None,
    cluster_domain: Annotated[str, typer.Option(help="DNS domain of the cluster.")] = "cluster.local",
) -> None:
    """Print the objects that the operator would create for a job.

    metadata.uid, which the API server assigns, is all zeros unless the file contains one.
    """
    settings = Settings(trainer_image=trainer_image or get_release_image(), cluster_domain=cluster_domain)
    run = plan_first_attempt(read_job_file(file, namespace=namespace), settings)
    if output is PlanFormat.YAML:
        print(dump_yaml(*build_children(run)), end="")
        print(summarise_plan(run), file=sys.stderr)
    else:
        print(summarise_plan(run))


def plan_first_attempt(job_file: JobFile, settings: Settings) -> RunPlan:
    """Return the run plan of the first attempt of a job that has not been created in a cluster."""
    return plan_run(_add_placeholder_uid(job_file.job), attempt=0, settings=settings)


def summarise_plan(run_plan: RunPlan) -> str:
    """Return a readable summary of the plan: processes, devices, batch, image, output and objects."""
    pods = ", ".join(node.pod_name for node in run_plan.nodes[:4]) + (", ..." if len(run_plan.nodes) > 4 else "")
    program: tuple[tuple[str, str], ...] = (("command", str(run_plan.spec.command)),)
    if run_plan.batch:
        rate = f"{resolve_learning_rates(run_plan.spec, run_plan.batch)} {run_plan.spec.training.lr_scheduler_type}"
        program = (("batch", f"{describe_batch(run_plan.spec)} ({BATCH_FACTORS})"), ("rate", rate))
    result_folder = "" if run_plan.spec.command else "/result"
    objects = f"Service {run_plan.service_name}; ConfigMap {run_plan.config_map_name}"
    if build_pod_group(run_plan) is not None:
        objects += f"; PodGroup {run_plan.pod_group_name}"
    lines = (
        ("job", f"{run_plan.namespace}/{run_plan.job_name}"),
        ("nodes", f"{len(run_plan.nodes)} x {run_plan.nproc_per_node} processes = {run_plan.world_size} ranks"),
        ("devices", describe_devices(run_plan.spec)),
        *program,
        ("image", run_plan.image),
        *((("group", _describe_group(run_plan)),) if run_plan.scheduling else ()),
        ("output", f"{run_plan.output}{result_folder}" if run_plan.output else "none; only the pods' logs remain"),
        ("objects", f"{objects}; Pods {pods}"),
    )
    return "\n".join(f"{name:<8} {text}" for name, text in lines)


def _describe_group(run_plan: RunPlan) -> str:
    """Describe what starts all pods together; the operator chooses it from what the cluster has."""
    scheduling, status = run_plan.spec.scheduling, run_plan.scheduling
    assert scheduling is not None
    assert status is not None
    queue = f", queue {scheduling.queue_name}" if scheduling.queue_name else ""
    choice = "" if scheduling.provider else ", unless the cluster has only another provider"
    return f"{len(run_plan.nodes)} pods together by {status.provider}{queue}{choice}"


def get_release_image() -> str:
    """Return the name of the trainer image of this release."""
    try:
        return f"{TRAINER_REPOSITORY}:v{metadata.version(names.MANAGER)}"
    except metadata.PackageNotFoundError:  # running from a source tree, without package metadata
        return f"{TRAINER_REPOSITORY}:dev"


def _add_placeholder_uid(job: "FineTuneJob") -> "FineTuneJob":
    uid = job.metadata.uid or PLACEHOLDER_UID
    return job.model_copy(update={"metadata": job.metadata.model_copy(update={"uid": uid})})
