"""Cluster of the queue benchmark: Kubernetes nodes with GPUs, Kueue, and one queue with priorities."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from benchmarks.queue.job_plans import GPU, PRIORITIES, QUEUE
from benchmarks.rig import NAMESPACE
from finetune_operator.kube.api_client import ApiClient
from finetune_operator.kube.api_paths import build_path, object_path
from testing.cluster.controller_managers import InstalledManager, install_manager
from testing.cluster.kueue import KUEUE
from testing.cluster.throwaway import ThrowawayCluster

API_VERSION = "kueue.x-k8s.io/v1beta2"
WEBHOOK_PORT = 9743  # another one than in the tests of queues, which may run at the same time
MERGE_PATCH = "application/merge-patch+json"
UNLIMITED = {"cpu": "100k", "memory": "1Pi"}

RawBody = dict[str, Any]


async def add_gpus(api: ApiClient, *, node_count: int, gpus_per_node: int) -> None:
    """Add GPUs to the capacity of the kwok nodes."""
    resources = {GPU: str(gpus_per_node)}
    body = {"status": {"capacity": resources, "allocatable": resources}}
    for number in range(1, node_count + 1):
        path = object_path("Node", None, f"kwok-{number}", "status")
        await api.call("PATCH", path, body=body, content_type=MERGE_PATCH)


@contextmanager
def install_kueue(cluster: ThrowawayCluster, *, quota: int) -> Iterator[InstalledManager]:
    """Install Kueue with one queue, in which jobs of higher priority preempt others."""
    with install_manager(cluster, replace(KUEUE, webhook_port=WEBHOOK_PORT)) as manager:
        cluster.kubectl.apply(*build_queue(quota))
        yield manager


def build_queue(quota: int) -> tuple[RawBody, ...]:
    """Return the queue with this number of GPUs, its flavor and the priorities."""
    resources = [{"name": name, "nominalQuota": value} for name, value in {GPU: str(quota), **UNLIMITED}.items()]
    group = {"coveredResources": [GPU, *UNLIMITED], "flavors": [{"name": QUEUE, "resources": resources}]}
    cluster_queue = {
        "namespaceSelector": {},
        "resourceGroups": [group],
        "preemption": {"withinClusterQueue": "LowerPriority"},
    }
    return (
        build_object("ResourceFlavor", QUEUE, spec={}),
        build_object("ClusterQueue", QUEUE, spec=cluster_queue),
        build_object("LocalQueue", QUEUE, namespace=NAMESPACE, spec={"clusterQueue": QUEUE}),
        *(build_object("WorkloadPriorityClass", name, value=value) for name, value in PRIORITIES.items()),
    )


def build_object(kind: str, name: str, *, namespace: str | None = None, **fields: Any) -> RawBody:
    metadata = {"name": name, **({"namespace": namespace} if namespace else {})}
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": metadata, **fields}


async def read_reserved_gpus(api: ApiClient) -> int:
    """Return the GPUs that are reserved according to the ClusterQueue."""
    queue = await api.call("GET", build_path(API_VERSION, "clusterqueues", QUEUE))
    flavors = queue.get("status", {}).get("flavorsReservation") or ()
    totals = (resource["total"] for flavor in flavors for resource in flavor["resources"] if resource["name"] == GPU)
    return sum(int(total) for total in totals)
