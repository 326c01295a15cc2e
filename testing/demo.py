"""`make demo`: a FineTuneJob from `kubectl apply` to Complete, on the most real cluster this machine can have."""

from __future__ import annotations

import os
import shutil
import sys
import time

from testing.cluster.provider import Choice, choose_provider
from testing.models.loss_curve import loss_curve, read_losses
from testing.processes.local_demo import run_locally
from testing.processes.operator_stack import Stack, condition, example_job

JOB = "demo"


def main() -> int:
    choice = choose_provider(os.environ)
    say(f"demo on {choice.kind}: {choice.why}")
    if choice.provider is None:
        return run_locally()
    try:
        return run_on_cluster(choice)
    finally:
        if "--keep" not in sys.argv and choice.kind != "current":
            choice.provider.down()
        elif choice.kind != "current":
            say(f"the cluster stays: export KUBECONFIG={choice.provider.kubeconfig}; `make cluster-down` ends it")


def run_on_cluster(choice: Choice) -> int:
    assert choice.provider is not None
    stack = Stack(choice.provider)
    stack.prepare()
    stack.delete(JOB)
    shutil.rmtree(stack.output(JOB), ignore_errors=True)  # of an earlier demo, which was another job
    with stack.stage("job applied to Complete"):
        say("$ kubectl apply -f manifests/examples/cpu-two-nodes.yaml")
        stack.apply(example_job(JOB))
        job = follow(stack)
    show(stack)
    say("\nseconds per stage:")
    for title, seconds in stack.stages.items():
        say(f"  {title:28} {seconds:7.1f}")
    return 0 if condition(job, "Complete") else 1


def follow(stack: Stack) -> dict[str, object]:
    """Print the job's line whenever it changes, until the job is finished."""
    before: list[str] = []
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        header, row = stack.kubectl("get", "ftj", JOB).splitlines()
        told = row.split()[:-1]  # without the age, which changes by itself
        if told != before:
            say(*([] if before else [header]), row)
            before = told
        job = stack.job(JOB)
        if condition(job, "Finished"):
            return job
        time.sleep(0.5)
    return stack.job(JOB)


def show(stack: Stack) -> None:
    """What a user looks at afterwards: list, story, loss curve, files."""
    say("\n$ kubectl get ftj\n" + stack.kubectl("get", "ftj"))
    say("$ kubectl describe ftj demo  (events)")
    described = stack.kubectl("describe", "ftj", JOB)
    say(described[described.index("Events:") :])
    output = stack.output(JOB)
    say("loss by step:")
    say(loss_curve(read_losses(output)))
    say(f"\nfiles in the claim `models`, {stack.namespace}/{JOB}/result:")
    for path in sorted((output / "result").rglob("*")):
        if path.is_file():
            say(f"  {path.relative_to(output / 'result')!s:36} {path.stat().st_size:>10,} bytes")


def say(*lines: str) -> None:
    for line in lines:
        if line:
            print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
