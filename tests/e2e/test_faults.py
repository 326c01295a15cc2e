"""Whatever dies, the ranks restart together from the last checkpoint and the job ends Complete."""

from collections.abc import Callable

import pytest

from cluster.chaos import Chaos
from support.stack import OPERATOR_NAMESPACE, Stack, condition
from support.training import last_checkpoint, training, wait_for_checkpoint

pytestmark = pytest.mark.cluster
Start = Callable[..., str]


def kill_rank(stack: Stack, chaos: Chaos, job: str) -> None:
    chaos.kill_rank(stack.namespace, f"{job}-0-1", rank=3)


def kill_container(stack: Stack, chaos: Chaos, job: str) -> None:
    chaos.kill_container(stack.namespace, f"{job}-0-1")


def delete_pod(stack: Stack, _: Chaos, job: str) -> None:
    stack.kubectl("delete", "pod", f"{job}-0-1", "--wait=false")


FAULTS = {
    "rank SIGKILLed": (kill_rank, "RankKilled"),
    "container killed": (kill_container, "ContainerKilled"),
    "pod deleted": (delete_pod, "PodDeleted"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_coherent_restart_resumes_from_the_last_checkpoint(
    stack: Stack, chaos: Chaos, start: Start, fault: str
) -> None:
    strike, reason = FAULTS[fault]
    job = start(training=training(max_steps=120, save_steps=20))
    wait_for_checkpoint(stack, job)
    saved = last_checkpoint(stack, job)

    strike(stack, chaos, job)
    finished = stack.wait_finished(job)

    assert condition(finished, "Complete"), finished["status"]
    first, second = finished["status"]["attempts"]
    assert first["reason"] == reason, first
    assert first["nodeRank"] == 1
    assert second["firstStep"] >= saved > 0
    assert finished["status"]["restarts"] == 1
    assert finished["status"]["progress"]["step"] == 120
    assert {pod["metadata"]["labels"]["finetune.dev/attempt"] for pod in stack.pods(job)} == {"1"}


def before_the_pods_exist(_stack: Stack, _chaos: Chaos, _job: str) -> None:
    """Right after the apply."""


def while_starting(stack: Stack, _: Chaos, job: str) -> None:
    stack.wait(job, lambda j: len(j.get("status", {}).get("nodes", [])) > 0, what="started")


def while_running(stack: Stack, _: Chaos, job: str) -> None:
    wait_for_checkpoint(stack, job)


def while_restarting(stack: Stack, chaos: Chaos, job: str) -> None:
    wait_for_checkpoint(stack, job)
    kill_container(stack, chaos, job)


def while_suspending(stack: Stack, _: Chaos, job: str) -> None:
    wait_for_checkpoint(stack, job)
    stack.kubectl("patch", "ftj", job, "--type=merge", "-p", '{"spec":{"suspend":true}}')


PHASES = (before_the_pods_exist, while_starting, while_running, while_restarting, while_suspending)


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.__name__.replace("_", " "))
def test_killing_the_operator_changes_nothing(
    stack: Stack, chaos: Chaos, start: Start, phase: Callable[[Stack, Chaos, str], None]
) -> None:
    job = start(training=training(max_steps=80, save_steps=20))
    phase(stack, chaos, job)

    operators = stack.kubectl("get", "pods", "-n", OPERATOR_NAMESPACE, "-o", "name").split()
    assert operators
    stack.kubectl("delete", "-n", OPERATOR_NAMESPACE, "--grace-period=0", "--force", *operators)

    if phase is while_suspending:
        stack.wait(job, lambda j: condition(j, "Suspended"), what="Suspended")
        stack.kubectl("patch", "ftj", job, "--type=merge", "-p", '{"spec":{"suspend":false}}')
    finished = stack.wait_finished(job)
    assert condition(finished, "Complete"), finished["status"]
    assert finished["status"].get("restarts", 0) == (1 if phase is while_restarting else 0)
    assert finished["status"]["progress"]["step"] == 80
