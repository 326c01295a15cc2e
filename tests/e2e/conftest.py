"""Fixtures of the end-to-end tests: one cluster for all workers, one namespace per worker and one job per test."""

import os
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from testing.builders.jobs import command
from testing.cluster.fault_injection import Chaos
from testing.cluster.images.project_images import get_image_name
from testing.cluster.provider import choose_provider
from testing.faults.training_job import build_program_fields, copy_programs
from testing.processes.operator_stack import OperatorInstallation, build_example_job
from testing.processes.shared_installation import share_installation


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Start with the tests that run jobs, so that the last tests of all workers, which are short, end together."""
    if "PYTEST_XDIST_WORKER" in os.environ:  # in one process, a module would set up its fixtures twice
        items.sort(key=lambda item: {"job_name", "newcomer"}.isdisjoint(item.fixturenames))


@pytest.fixture(scope="session")
def deployment(worker_id: str, testrun_uid: str) -> Iterator[OperatorInstallation]:
    choice = choose_provider(os.environ)
    if choice.provider is None:
        pytest.skip(f"no cluster: {choice.explanation}")
    with share_installation(choice.provider, worker=worker_id, run=testrun_uid) as deployment:
        yield deployment


@pytest.fixture
def fault_injector(deployment: OperatorInstallation) -> Chaos:
    """Return the fault injector, which only the throwaway cluster provides."""
    if deployment.provider.chaos is None:
        pytest.skip("killing processes needs the throwaway cluster")
    return deployment.provider.chaos


@pytest.fixture
def job_name(request: pytest.FixtureRequest) -> str:
    """Return a unique job name derived from the test name, because outputs of earlier jobs remain in the claim."""
    test_name = request.node.name.removeprefix("test_").split("[")[0].replace("_", "-")
    return f"{test_name[:40].strip('-')}-{secrets.token_hex(3)}"


@pytest.fixture
def start_job(deployment: OperatorInstallation, job_name: str) -> Iterator[Callable[..., str]]:
    """Return a function that applies the CPU example with changed spec fields.

    After the test, delete the job and wait until its children are gone.
    """
    started_jobs: list[str] = []

    def apply_job(**fields: Any) -> str:
        deployment.apply(build_example_job(job_name, **fields))
        started_jobs.append(job_name)
        return job_name

    yield apply_job
    for job in started_jobs:
        deployment.delete(job)
        for kind in ("pods", "services", "configmaps"):
            deployment.kubectl("wait", "--for=delete", kind, "-l", f"finetune.dev/job-name={job}", "--timeout=60s")


@pytest.fixture
def start_program(start_job: Callable[..., str]) -> Callable[..., str]:
    """Return a function that starts a job with a shell command on every node, in an image without torch."""

    def start(program: str, **fields: Any) -> str:
        return start_job(**command({"exec": ["sh", "-c", program]}, image=get_image_name("operator"), **fields))

    return start


@pytest.fixture
def start_training_program(deployment: OperatorInstallation, start_job: Callable[..., str]) -> Callable[[], str]:
    """Return a function that starts a job whose program saves and resumes until its output contains `finish`."""

    def start() -> str:
        copy_programs(deployment)
        return start_job(**build_program_fields())

    return start
