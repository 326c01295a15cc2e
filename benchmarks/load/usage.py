"""Measures the CPU time, memory and API requests of a cluster with its controllers."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from pathlib import Path

from benchmarks.load.contender import ControllerMetrics, LoadContender
from benchmarks.rig import read_cpu_seconds, read_memory_mib
from testing.cluster.host.processes import find_daemons
from testing.cluster.throwaway import ThrowawayCluster

CONTROLLERS = "controllers"
CLUSTER_PROGRAMS = ("kube-apiserver", "etcd", "kube-controller-manager", "kube-scheduler", "kwok")
_REQUEST_COUNT = re.compile(r"^apiserver_request_total\{(.*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class Usage:
    """CPU seconds by program, API requests of all clients without watches and leases, and controller metrics."""

    cpu_seconds: dict[str, float]
    api_requests: float
    metrics: ControllerMetrics

    def __sub__(self, earlier: Usage) -> Usage:
        requests = self.metrics.requests - earlier.metrics.requests
        passes = self.metrics.passes - earlier.metrics.passes
        return Usage(
            {name: seconds - earlier.cpu_seconds[name] for name, seconds in self.cpu_seconds.items()},
            self.api_requests - earlier.api_requests,
            ControllerMetrics(requests, passes),
        )


async def measure_usage(cluster: ThrowawayCluster, contender: LoadContender) -> Usage:
    """Measure the usage since the start of the cluster and of the contender's controllers."""
    cpu_seconds = measure_cpu_seconds(cluster, contender)
    metrics = await asyncio.to_thread(contender.read_metrics)
    text = await asyncio.to_thread(cluster.kubectl, "get", "--raw", "/metrics")
    return Usage(cpu_seconds, count_api_requests(text), metrics)


def measure_cpu_seconds(cluster: ThrowawayCluster, contender: LoadContender) -> dict[str, float]:
    """Return the CPU seconds of each program of the cluster, and of the contender's controllers together."""
    pids = {daemon.name: daemon.pid() for daemon in find_daemons(cluster.layout.daemons)}
    seconds = {name: read_cpu_seconds(Path(f"/proc/{pids[name]}")) for name in CLUSTER_PROGRAMS}
    if controllers := contender.list_controllers():
        seconds[CONTROLLERS] = sum(read_cpu_seconds(Path(f"/proc/{pid}")) for pid in controllers)
    return seconds


def measure_memory_mib(contender: LoadContender) -> float:
    """Return the resident memory of the contender's controllers in MiB."""
    return sum(read_memory_mib(pid) for pid in contender.list_controllers())


def count_api_requests(metrics: str) -> float:
    """Count the requests for resources in the metrics of an API server, without watches and leases."""
    count = 0.0
    for labels, number in _REQUEST_COUNT.findall(metrics):
        values = dict(_LABEL.findall(labels))
        if values["resource"] not in ("", "leases") and values["verb"] not in ("WATCH", "CONNECT"):
            count += float(number)
    return count
