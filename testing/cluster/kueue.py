"""Kueue for the tests of queues, from its Go module."""

from __future__ import annotations

from testing.cluster.controller_managers import ControllerManager

KUEUE = ControllerManager(
    name="kueue",
    version="0.19.2",
    module="sigs.k8s.io/kueue",
    package="./cmd/kueue",
    manifests="config/default",
    namespace="kueue-system",
    secret="kueue-webhook-server-cert",  # noqa: S106
    config_map="kueue-manager-config",
    webhook_port=9643,
    serves_api=True,
)
