"""One cluster with the operator for the whole run; each test has its own job, and leaves nothing behind."""

import os
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from testing.cluster.fault_injection import Chaos
from testing.cluster.provider import ClusterKind, choose_provider
from testing.processes.operator_stack import Stack, example_job


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    choice = choose_provider(os.environ)
    if choice.provider is None:
        pytest.skip(f"no cluster: {choice.why}")
    stack = Stack(choice.provider)
    stack.prepare()
    yield stack
    if choice.kind is not ClusterKind.CURRENT and os.environ.get("KEEP_CLUSTER") != "1":
        choice.provider.down()


@pytest.fixture
def chaos(stack: Stack) -> Chaos:
    """The means to break things, which only the throwaway cluster has."""
    if stack.provider.chaos is None:
        pytest.skip("killing processes needs the throwaway cluster")
    return stack.provider.chaos


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A job name made from the test's own, and of no job before it: what that left in the output stays there."""
    words = request.node.name.removeprefix("test_").split("[")[0].replace("_", "-")
    return f"{words[:40].strip('-')}-{secrets.token_hex(3)}"


@pytest.fixture
def start(stack: Stack, name: str) -> Iterator[Callable[..., str]]:
    """Apply the CPU example with fields of its spec replaced; afterwards the job and all its children are gone."""
    started: list[str] = []

    def apply(**fields: Any) -> str:
        stack.apply(example_job(name, **fields))
        started.append(name)
        return name

    yield apply
    for job in started:
        stack.delete(job)
        for kind in ("pods", "services", "configmaps"):
            stack.kubectl("wait", "--for=delete", kind, "-l", f"finetune.dev/job-name={job}", "--timeout=60s")
