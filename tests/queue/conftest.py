"""Fixtures of the tests of queues and gangs: a cluster with PodGroups, Kueue and the operator."""

import os
import secrets
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

from testing.cluster.controller_managers import install_manager
from testing.cluster.kueue import KUEUE
from testing.cluster.provider import ThrowawayProvider, choose_provider
from testing.processes.operator_stack import OperatorInstallation
from testing.processes.queues import Queues
from testing.processes.shared_installation import share_installation


@pytest.fixture(scope="session")
def deployment(worker_id: str, testrun_uid: str) -> Iterator[OperatorInstallation]:
    choice = choose_provider(os.environ)
    if not isinstance(choice.provider, ThrowawayProvider):
        pytest.skip(f"queues need the throwaway cluster: {choice.explanation}")
    provider = replace(choice.provider, pod_groups=True)
    extend = partial(install_manager, provider.cluster, KUEUE)
    with share_installation(provider, worker=worker_id, run=testrun_uid, extend=extend) as deployment:
        yield deployment


@pytest.fixture
def queues(deployment: OperatorInstallation) -> Iterator[Queues]:
    """Return a queue with quota for one job of two nodes; the jobs, the queue and its quota are deleted at the end."""
    queues = Queues(deployment, name=f"q-{secrets.token_hex(3)}")
    queues.create({"cpu": "1"})
    yield queues
    queues.remove()
