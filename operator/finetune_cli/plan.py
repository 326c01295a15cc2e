"""`finetune plan`: exactly the objects that the operator would create for the first attempt."""

import sys
from enum import StrEnum
from importlib import metadata
from typing import TYPE_CHECKING, Annotated

import typer
import yaml

from finetune_api.learning_rates import resolve_rates
from finetune_cli.job_file import FileArgument, JobFile, NamespaceOption, read_job_file
from finetune_operator import names
from finetune_operator.plan.manifests import build_children
from finetune_operator.plan.run_plan import RunPlan, Settings, describe_batch, plan_run

if TYPE_CHECKING:
    from finetune_api.v1alpha1.job import FineTuneJob

NO_UID = "00000000-0000-0000-0000-000000000000"  # the API server gives the real one
FACTORS = "per device x accumulation x ranks"
TRAINER = "ghcr.io/finetune-operator/trainer"


class Format(StrEnum):
    """What is printed."""

    YAML = "yaml"
    SUMMARY = "summary"


TrainerImage = Annotated[
    str | None,
    typer.Option("--trainer-image", help="Image of jobs that name none, as the operator was given it (its release)."),
]


def plan(
    file: FileArgument,
    namespace: NamespaceOption = None,
    output: Annotated[Format, typer.Option("--output", "-o", help="What to print on stdout.")] = Format.YAML,
    trainer_image: TrainerImage = None,
    cluster_domain: Annotated[str, typer.Option(help="DNS domain of the cluster.")] = "cluster.local",
) -> None:
    """Print the objects the operator would create for a job, without a cluster.

    metadata.uid, which the API server gives, is all zeros unless the file has one.
    """
    settings = Settings(trainer_image=trainer_image or release_image(), cluster_domain=cluster_domain)
    run = plan_first_attempt(read_job_file(file, namespace=namespace), settings)
    if output is Format.YAML:
        print(yaml.safe_dump_all(build_children(run), sort_keys=False), end="")
        print(summarise(run), file=sys.stderr)
    else:
        print(summarise(run))


def plan_first_attempt(file: JobFile, settings: Settings) -> RunPlan:
    """Attempt 0 of a job that no API server has seen."""
    return plan_run(_with_uid(file.job), attempt=0, settings=settings)


def summarise(run: RunPlan) -> str:
    """The plan for people: how many processes, which batch, which image, where the result goes."""
    pods = ", ".join(node.pod_name for node in run.nodes[:4]) + (", ..." if len(run.nodes) > 4 else "")
    work: tuple[tuple[str, str], ...] = (("command", str(run.spec.command)),)
    if run.batch:
        rate = f"{resolve_rates(run.spec, run.batch)} {run.spec.training.lr_scheduler_type}"
        work = (("batch", f"{describe_batch(run.spec)} ({FACTORS})"), ("rate", rate))
    result = "" if run.spec.command else "/result"
    lines = (
        ("job", f"{run.namespace}/{run.job_name}"),
        ("nodes", f"{len(run.nodes)} x {run.nproc_per_node} processes = {run.world_size} ranks"),
        *work,
        ("image", run.image),
        ("output", f"{run.output}{result}" if run.output else "none; only the pods' logs tell of it"),
        ("objects", f"Service {run.service_name}; ConfigMap {run.config_map_name}; Pods {pods}"),
    )
    return "\n".join(f"{name:<8} {text}" for name, text in lines)


def release_image() -> str:
    """The trainer image of this release."""
    try:
        return f"{TRAINER}:v{metadata.version(names.MANAGER)}"
    except metadata.PackageNotFoundError:  # run from a source tree
        return f"{TRAINER}:dev"


def _with_uid(job: "FineTuneJob") -> "FineTuneJob":
    uid = job.metadata.uid or NO_UID
    return job.model_copy(update={"metadata": job.metadata.model_copy(update={"uid": uid})})
