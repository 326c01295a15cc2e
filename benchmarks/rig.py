"""Benchmark rig: a throwaway cluster with kwok nodes, an operator process and recorded pod times."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import yaml

from finetune_operator import names
from finetune_operator.kube.api_client import ApiClient
from finetune_operator.kube.cluster import collection_path
from finetune_operator.kube.credentials import find_credentials, open_session
from finetune_operator.kube.informer import Informer
from testing.cluster.kwok import start_kwok
from testing.cluster.throwaway import ThrowawayCluster

NAMESPACE = "bench"
METRICS_PORT = 28080
REPOSITORY = Path(__file__).parents[1]
FAKE_NODES = 40
CLUSTER_PROGRAMS = ("kube-apiserver", "etcd", "kube-scheduler", "kube-controller-manager", "kwok")

RawBody = dict[str, Any]


@dataclass(frozen=True)
class ResourceUsage:
    """Resources that the operator process and the cluster have used so far."""

    cpu_seconds: float
    memory_mib: float
    requests: Counter[str]
    passes: Counter[float]  # number of passes by upper bound of the duration in seconds
    cluster_cpu_seconds: Counter[str]  # CPU seconds by program


class PodTimes:
    """Monotonic times at which each pod was first observed and first observed running."""

    def __init__(self) -> None:
        self.created_at: dict[str, float] = {}
        self.running_at: dict[str, float] = {}
        self.deleted_names: set[str] = set()
        self.pods: dict[str, RawBody] = {}
        self.changed = asyncio.Event()

    def on_pod_event(self, old_pod: RawBody | None, new_pod: RawBody | None) -> None:
        """Record a pod event of an informer."""
        if old_pod is not None and new_pod is None:
            self.deleted_names.add(old_pod["metadata"]["name"])
        if new_pod is not None:
            name = new_pod["metadata"]["name"]
            self.pods[name] = new_pod
            self.created_at.setdefault(name, time.monotonic())
            if new_pod.get("status", {}).get("phase") == "Running":
                self.running_at.setdefault(name, time.monotonic())
        self.changed.set()


class Rig:
    """Cluster connection, operator process and pod times of a benchmark."""

    def __init__(self, api: ApiClient, operator: subprocess.Popen[bytes], pod_times: PodTimes) -> None:
        self.api = api
        self.operator = operator
        self.pod_times = pod_times

    def measure_usage(self) -> ResourceUsage:
        """Measure the usage from /proc and the operator's metrics."""
        cpu = read_cpu_seconds(Path(f"/proc/{self.operator.pid}"))
        memory = read_memory_mib(self.operator.pid)
        metrics = read_metrics()
        return ResourceUsage(cpu, memory, count_requests(metrics), count_passes(metrics), measure_cluster_cpu())


def read_memory_mib(pid: int) -> float:
    """Return the resident memory of a process in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) / 1024  # type: ignore[index]


def read_cpu_seconds(process_folder: Path) -> float:
    """Return the user and system time of a process in seconds."""
    fields = (process_folder / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_cluster_cpu() -> Counter[str]:
    """Return the CPU seconds that each program of the cluster has used so far."""
    used_seconds: Counter[str] = Counter()
    for process_folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            program = Path(os.fsdecode((process_folder / "cmdline").read_bytes().split(b"\0")[0])).name
            if program in CLUSTER_PROGRAMS:
                used_seconds[program] += read_cpu_seconds(process_folder)  # type: ignore[assignment]
    return used_seconds


def read_metrics() -> str:
    """Return the operator's metrics in the Prometheus text format."""
    with urllib.request.urlopen(f"http://127.0.0.1:{METRICS_PORT}/metrics", timeout=5) as response:
        text: str = response.read().decode()
    return text


def count_passes(metrics: str) -> Counter[float]:
    """Count the reconcile passes in each bucket of the duration histogram, by the upper bound of the bucket."""
    cumulative_buckets: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for labels, number in re.findall(r"^finetune_reconcile_seconds_bucket\{(.*)\} (\S+)$", metrics, re.MULTILINE):
        label_values = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        cumulative_buckets[label_values["result"]].append((float(label_values["le"]), float(number)))
    pass_counts: Counter[float] = Counter()
    for buckets in cumulative_buckets.values():
        previous_count = 0.0
        for upper_bound, count in sorted(buckets):
            pass_counts[upper_bound] += int(count - previous_count)
            previous_count = count
    return pass_counts


def count_requests(metrics: str) -> Counter[str]:
    """Count the operator's API requests by verb, resource and status code."""
    request_counts: Counter[str] = Counter()
    for labels, number in re.findall(r"^finetune_api_requests_total\{(.*)\} (\S+)$", metrics, re.MULTILINE):
        label_values = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        title = f"{label_values['verb']} {label_values['resource']} {label_values['code']}"
        request_counts[title] += int(float(number))
    return request_counts


@asynccontextmanager
async def start_bench_rig(*, keep_cluster: bool) -> AsyncIterator[Rig]:
    """Start a cluster with the operator and an informer of its pods."""
    async with start_fake_cluster("bench", keep_cluster=keep_cluster) as (cluster, api):
        with start_operator(cluster.kubeconfig, create_operator_log()) as operator:
            pod_times = PodTimes()
            pods_path = collection_path("Pod", NAMESPACE)
            informer = Informer(api, pods_path, selector=names.JOB_NAME, on_change=pod_times.on_pod_event)
            informer_task = asyncio.create_task(informer.run())
            await informer.synced.wait()
            await wait_until_operator_ready()
            yield Rig(api, operator, pod_times)
            informer_task.cancel()
            with suppress(asyncio.CancelledError):
                await informer_task


@asynccontextmanager
async def start_fake_cluster(name: str, *, keep_cluster: bool) -> AsyncIterator[tuple[ThrowawayCluster, ApiClient]]:
    """Start a cluster with kwok nodes, the CRD and a claim for all jobs; remove the cluster afterwards."""
    cluster = ThrowawayCluster.from_name(name)
    cluster.up(node_count=1)
    try:
        start_kwok(cluster, FAKE_NODES)
        cluster.kubectl("apply", "--server-side", "-f", str(REPOSITORY / "manifests" / "crd" / "finetunejobs.yaml"))
        cluster.kubectl("wait", "--for=condition=Established", "crd/finetunejobs.finetune.dev", "--timeout=30s")
        cluster.kubectl.apply(*build_namespace_and_claim())
        async with connect_to_api(cluster.kubeconfig) as api:
            yield cluster, api
    finally:
        if not keep_cluster:
            cluster.down(purge=True)


@asynccontextmanager
async def connect_to_api(kubeconfig: Path) -> AsyncIterator[ApiClient]:
    credentials = find_credentials(kubeconfig=str(kubeconfig))
    async with (
        open_session(credentials, connections=500) as request_session,
        open_session(credentials, connections=500) as watch_session,
    ):
        yield ApiClient(credentials.server, request_session=request_session, watch_session=watch_session)


def create_operator_log() -> IO[bytes]:
    """Create a log file for all operator processes and print its path."""
    log = tempfile.NamedTemporaryFile(prefix="bench-operator-", suffix=".log", delete=False)  # noqa: SIM115
    print(f"operator log: {log.name}", file=sys.stderr)
    return log


def start_operator(kubeconfig: Path, log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start the operator without leader election; return a context manager that terminates the process."""
    flags = [
        "--kubeconfig",
        str(kubeconfig),
        "--namespace",
        NAMESPACE,
        "--no-leader-election",
        "--log-level",
        "warning",
    ]
    command = [sys.executable, "-m", "finetune_operator", *flags, "--trainer-image", "localhost/none:v0"]
    process = subprocess.Popen([*command, "--metrics-port", str(METRICS_PORT)], stdout=log, stderr=log)
    return TerminateOnExit(process)  # type: ignore[return-value]


class TerminateOnExit:
    """Context manager that terminates a process on exit."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def __enter__(self) -> subprocess.Popen[bytes]:
        return self.process

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=15)
        except subprocess.TimeoutExpired:  # do not hide an earlier error
            self.process.kill()
            self.process.wait()


async def wait_until_operator_ready(*, timeout_seconds: float = 20.0) -> None:
    """Wait until /readyz returns 200.

    Raises: TimeoutError
    """
    async with asyncio.timeout(timeout_seconds):
        while not await asyncio.to_thread(is_operator_ready):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


def is_operator_ready() -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{METRICS_PORT}/readyz", timeout=1) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def build_namespace_and_claim() -> tuple[RawBody, ...]:
    """Return the namespace, and the volume and claim that all jobs use."""
    return tuple(
        yaml.safe_load_all(f"""
apiVersion: v1
kind: Namespace
metadata: {{name: {NAMESPACE}}}
---
apiVersion: v1
kind: PersistentVolume
metadata: {{name: {NAMESPACE}-models}}
spec:
  capacity: {{storage: 1Gi}}
  accessModes: [ReadWriteMany]
  storageClassName: ""
  claimRef: {{namespace: {NAMESPACE}, name: models}}
  hostPath: {{path: /nonexistent}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{name: models, namespace: {NAMESPACE}}}
spec:
  accessModes: [ReadWriteMany]
  storageClassName: ""
  volumeName: {NAMESPACE}-models
  resources: {{requests: {{storage: 1Gi}}}}
""")
    )
