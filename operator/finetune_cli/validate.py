"""`finetune validate`: is the job file right, as far as that can be known without a cluster?"""

from finetune_cli.job_file import FileArgument, NamespaceOption, read_job_file
from finetune_cli.plan import plan_first_attempt, release_image, summarise
from finetune_operator.plan.run_plan import Settings


def validate(file: FileArgument, namespace: NamespaceOption = None) -> None:
    """Check a job file: fields, types, and numbers that must agree. Exit code 2 if something is wrong."""
    read = read_job_file(file, namespace=namespace)
    print(f"{file}: valid")
    print(summarise(plan_first_attempt(read, Settings(trainer_image=release_image()))))
