"""Benchmark rig: a throwaway cluster with kwok nodes, and an operator process with its metrics."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any

import yaml

from finetune_operator.kube.api_client import ApiClient
from finetune_operator.kube.credentials import find_credentials, open_session
from testing.cluster.kwok import OMITTED_STAGE, start_kwok
from testing.cluster.throwaway import ThrowawayCluster

NAMESPACE = "bench"
METRICS_PORT = 28080
REPOSITORY = Path(__file__).parents[1]
FAKE_NODES = 40

RawBody = dict[str, Any]


def read_memory_mib(pid: int) -> float:
    """Return the resident memory of a process in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) / 1024  # type: ignore[index]


def read_cpu_seconds(process_folder: Path) -> float:
    """Return the user and system time of a process in seconds."""
    fields = (process_folder / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
async def start_fake_cluster(
    name: str,
    *,
    keep_cluster: bool,
    node_count: int = FAKE_NODES,
    omitted_stages: Collection[str] = (OMITTED_STAGE,),
) -> AsyncIterator[tuple[ThrowawayCluster, ApiClient]]:
    """Start a cluster with kwok nodes, the CRD and a claim for all jobs; remove the cluster afterwards."""
    cluster = ThrowawayCluster.from_name(name)
    cluster.up(node_count=1)
    try:
        start_kwok(cluster, node_count, omitted_stages=omitted_stages)
        cluster.kubectl("apply", "--server-side", "-f", str(REPOSITORY / "manifests" / "crd" / "finetunejobs.yaml"))
        cluster.kubectl.wait_for_crds("finetunejobs.finetune.dev", timeout_seconds=60)
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
    flags = ["--kubeconfig", str(kubeconfig), "--namespace", NAMESPACE, "--no-leader-election"]
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
