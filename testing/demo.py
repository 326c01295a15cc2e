"""`make demo`: run a FineTuneJob from `kubectl apply` to Complete, on a cluster or, without one, locally."""

from __future__ import annotations

import os
import shutil
import sys
import time

from testing.cluster.provider import ProviderChoice, choose_provider
from testing.models.loss_curve import read_losses, render_loss_curve
from testing.processes.local_demo import run_locally
from testing.processes.operator_stack import OperatorInstallation, build_example_job, has_condition

JOB = "demo"


def main() -> int:
    choice = choose_provider(os.environ)
    print_lines(f"cluster: {choice.kind} ({choice.explanation})")
    if choice.provider is None:
        return run_locally()
    try:
        return run_on_cluster(choice)
    finally:
        if "--keep" not in sys.argv and choice.kind != "current":
            choice.provider.down()
        elif choice.kind != "current":
            print_lines(
                f"the cluster keeps running: export KUBECONFIG={choice.provider.kubeconfig}; "
                "stop it with `make cluster-down`"
            )


def run_on_cluster(choice: ProviderChoice) -> int:
    assert choice.provider is not None
    installation = OperatorInstallation(choice.provider)
    installation.prepare()
    installation.delete(JOB)
    shutil.rmtree(installation.get_output_folder(JOB), ignore_errors=True)  # remove the output of an earlier demo job
    with installation.stage("job from apply to Complete"):
        print_lines("$ kubectl apply -f manifests/examples/cpu-two-nodes.yaml")
        installation.apply(build_example_job(JOB))
        job = follow_job(installation)
    print_result(installation)
    print_lines("\nduration of each stage in seconds:")
    for title, seconds in installation.stages.items():
        print_lines(f"  {title:28} {seconds:7.1f}")
    return 0 if has_condition(job, "Complete") else 1


def follow_job(installation: OperatorInstallation) -> dict[str, object]:
    """Print the job's row of `kubectl get` whenever it changes, until the job is finished."""
    previous_columns: list[str] = []
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        header, row = installation.kubectl("get", "ftj", JOB).splitlines()
        columns = row.split()[:-1]  # omit the age, which always changes
        if columns != previous_columns:
            print_lines(*([] if previous_columns else [header]), row)
            previous_columns = columns
        job = installation.get_job(JOB)
        if has_condition(job, "Finished"):
            return job
        time.sleep(0.5)
    return installation.get_job(JOB)


def print_result(installation: OperatorInstallation) -> None:
    """Print the row, events, loss curve and result files of the finished job."""
    print_lines("\n$ kubectl get ftj\n" + installation.kubectl("get", "ftj"))
    print_lines("$ kubectl describe ftj demo  (events)")
    description = installation.kubectl("describe", "ftj", JOB)
    print_lines(description[description.index("Events:") :])
    output = installation.get_output_folder(JOB)
    print_lines("loss by step:")
    print_lines(render_loss_curve(read_losses(output)))
    print_lines(f"\nfiles in claim `models`, folder {installation.namespace}/{JOB}/result:")
    for path in sorted((output / "result").rglob("*")):
        if path.is_file():
            print_lines(f"  {path.relative_to(output / 'result')!s:36} {path.stat().st_size:>10,} bytes")


def print_lines(*lines: str) -> None:
    for line in lines:
        if line:
            print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
