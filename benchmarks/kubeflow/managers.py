"""Installs Kubeflow Trainer and JobSet on the throwaway cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from testing.cluster.controller_managers import ControllerManager, InstalledManager, install_manager
from testing.cluster.throwaway import ThrowawayCluster

JOBSET = ControllerManager(
    name="jobset",
    version="0.12.0",
    module="sigs.k8s.io/jobset",
    package=".",
    manifests="config/default",
    namespace="jobset-system",
    secret="jobset-webhook-server-cert",  # noqa: S106
    config_map="jobset-manager-config",
    webhook_port=9443,
)
TRAINER = ControllerManager(
    name="kubeflow-trainer",
    version="2.3.0",
    module="github.com/kubeflow/trainer/v2",
    package="./cmd/trainer-controller-manager",
    manifests="manifests/overlays/manager",
    namespace="kubeflow-system",
    secret="kubeflow-trainer-webhook-cert",  # noqa: S106
    config_map="kubeflow-trainer-config",
    webhook_port=9543,
)


@contextmanager
def install_managers(cluster: ThrowawayCluster) -> Iterator[tuple[InstalledManager, ...]]:
    """Install both managers and wait until they are ready; remove everything afterwards."""
    with ExitStack() as stack:
        yield tuple(stack.enter_context(install_manager(cluster, manager)) for manager in (JOBSET, TRAINER))
