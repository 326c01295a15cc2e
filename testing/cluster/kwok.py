"""Fake Kubernetes nodes for load tests: KWOK sets their pods to Running immediately, without containers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from testing.cluster.host.processes import Daemon
from testing.cluster.images.go_build import build_all
from testing.cluster.throwaway import ThrowawayCluster

OMITTED_STAGE = "pod-complete"  # ends the pods of a Job at once
ANNOTATION = "kwok.x-k8s.io/node"
LABELS = {"type": "kwok", "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}


def start_kwok(
    cluster: ThrowawayCluster, node_count: int, *, omitted_stages: Collection[str] = (OMITTED_STAGE,)
) -> None:
    """Create fake nodes, labelled `type: kwok` and tainted so that only pods with a toleration run there."""
    build_all(cluster.cache, cluster.state.versions, component_names=("kwok",))
    write_stages(cluster, omitted_stages)
    cluster.kubectl.apply(*(render_fake_node(number) for number in range(1, node_count + 1)))
    build_kwok_daemon(cluster).start()
    cluster.kubectl("wait", "--for=condition=Ready", "node", "--selector=type=kwok", "--timeout=60s")


def stop_kwok(cluster: ThrowawayCluster) -> None:
    """Stop KWOK and delete its nodes; their pods are deleted with them, without graceful termination."""
    build_kwok_daemon(cluster).stop()
    cluster.kubectl("delete", "node", "--selector=type=kwok", "--ignore-not-found")


def render_fake_node(number: int) -> Mapping[str, Any]:
    name = f"kwok-{number}"
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {ANNOTATION: "fake", "node.alpha.kubernetes.io/ttl": "0"},
            "labels": {**LABELS, "kubernetes.io/hostname": name},
        },
        "spec": {"taints": [{"key": ANNOTATION, "value": "fake", "effect": "NoSchedule"}]},
    }


def write_stages(cluster: ThrowawayCluster, omitted_stages: Collection[str]) -> None:
    """Write the file with the stages of nodes and pods that kwok performs."""
    stages = yaml.safe_load_all((get_program_folder(cluster) / "documents.yaml").read_text())
    kept_stages = [stage for stage in stages if stage["metadata"]["name"] not in omitted_stages]
    get_stages_file(cluster).write_text(yaml.safe_dump_all(kept_stages))


def get_program_folder(cluster: ThrowawayCluster) -> Path:
    return cluster.cache.get_binary_folder("kwok", cluster.state.versions.kwok)


def get_stages_file(cluster: ThrowawayCluster) -> Path:
    return cluster.layout.daemons / "kwok-stages.yaml"


def build_kwok_daemon(cluster: ThrowawayCluster) -> Daemon:
    arguments = (
        f"--kubeconfig={cluster.layout.kubeconfig('kwok')}",
        f"--config={get_stages_file(cluster)}",
        "--manage-all-nodes=false",
        f"--manage-nodes-with-annotation-selector={ANNOTATION}=fake",
        "--node-lease-duration-seconds=40",
    )
    return Daemon(
        name="kwok", argv=(str(get_program_folder(cluster) / "kwok"), *arguments), folder=cluster.layout.daemons
    )
