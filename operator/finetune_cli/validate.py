"""Command `finetune validate`, which checks a job file without a cluster."""

from finetune_cli.job_file import FileArgument, NamespaceOption, read_job_file
from finetune_cli.plan import get_release_image, plan_first_attempt, summarise_plan
from finetune_operator.settings import Settings


def validate(file: FileArgument, namespace: NamespaceOption = None) -> None:
    """Check the fields of a job file, their types and consistency. Exit code 2 if the file is not valid."""
    job_file = read_job_file(file, namespace=namespace)
    print(f"{file}: valid")
    print(summarise_plan(plan_first_attempt(job_file, Settings(trainer_image=get_release_image()))))
