"""A cluster of its own with kwok nodes, the operator as a process, and a watch that takes the time of every pod."""

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
from finetune_operator.kube.api_client import ApiServer
from finetune_operator.kube.cluster import collection_path
from finetune_operator.kube.credentials import find_access, open_session
from finetune_operator.kube.informer import Informer
from testing.cluster.kwok import start_kwok
from testing.cluster.throwaway import ThrowawayCluster

NAMESPACE = "bench"
METRICS_PORT = 28080
REPOSITORY = Path(__file__).parents[1]
FAKE_NODES = 40
CLUSTER_PROGRAMS = ("kube-apiserver", "etcd", "kube-scheduler", "kube-controller-manager", "kwok")

Raw = dict[str, Any]


@dataclass(frozen=True)
class Usage:
    """What the operator's process used so far."""

    cpu_seconds: float
    memory_mib: float
    requests: Counter[str]
    passes: Counter[float]  # by the upper bound of their duration, in seconds
    others: Counter[str]  # CPU seconds of the cluster's own processes, by program


class PodClock:
    """When each pod was first seen, and first seen running, on this process's monotonic clock."""

    def __init__(self) -> None:
        self.created: dict[str, float] = {}
        self.running: dict[str, float] = {}
        self.gone: set[str] = set()
        self.pods: dict[str, Raw] = {}
        self.changed = asyncio.Event()

    def note(self, before: Raw | None, pod: Raw | None) -> None:
        """Hear of one change, as an Informer tells it."""
        if before is not None and pod is None:
            self.gone.add(before["metadata"]["name"])
        if pod is not None:
            name = pod["metadata"]["name"]
            self.pods[name] = pod
            self.created.setdefault(name, time.monotonic())
            if pod.get("status", {}).get("phase") == "Running":
                self.running.setdefault(name, time.monotonic())
        self.changed.set()


class Rig:
    """What the load is put on."""

    def __init__(self, api: ApiServer, operator: subprocess.Popen[bytes], clock: PodClock) -> None:
        self.api = api
        self.operator = operator
        self.clock = clock

    def usage(self) -> Usage:
        """From /proc and from the operator's own metrics."""
        cpu, memory = cpu_seconds(Path(f"/proc/{self.operator.pid}")), memory_mib(self.operator.pid)
        text = read_metrics()
        return Usage(cpu, memory, count_requests(text), count_passes(text), measure_cluster())


def memory_mib(pid: int) -> float:
    """What a process holds in RAM."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) / 1024  # type: ignore[index]


def cpu_seconds(process: Path) -> float:
    """User and system time of a process."""
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_cluster() -> Counter[str]:
    """CPU seconds so far of the programs that make up the cluster."""
    used: Counter[str] = Counter()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            program = Path(os.fsdecode((process / "cmdline").read_bytes().split(b"\0")[0])).name
            if program in CLUSTER_PROGRAMS:
                used[program] += cpu_seconds(process)  # type: ignore[assignment]
    return used


def read_metrics() -> str:
    """The operator's own."""
    with urllib.request.urlopen(f"http://127.0.0.1:{METRICS_PORT}/metrics", timeout=5) as response:
        text: str = response.read().decode()
    return text


def count_passes(text: str) -> Counter[float]:
    """How many passes of reconcile took at most how long: of cumulative buckets, what each has more than the last."""
    cumulative: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for labels, number in re.findall(r"^finetune_reconcile_seconds_bucket\{(.*)\} (\S+)$", text, re.MULTILINE):
        said = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        cumulative[said["result"]].append((float(said["le"]), float(number)))
    counted: Counter[float] = Counter()
    for buckets in cumulative.values():
        below = 0.0
        for bound, count in sorted(buckets):
            counted[bound] += int(count - below)
            below = count
    return counted


def count_requests(text: str) -> Counter[str]:
    """API requests of the operator so far, by verb and resource."""
    counted: Counter[str] = Counter()
    for labels, number in re.findall(r"^finetune_api_requests_total\{(.*)\} (\S+)$", text, re.MULTILINE):
        said = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        counted[f"{said['verb']} {said['resource']} {said['code']}"] += int(float(number))
    return counted


@asynccontextmanager
async def bench_rig(*, keep: bool) -> AsyncIterator[Rig]:
    """A cluster with the operator, and a watch of its pods."""
    async with fake_cluster("bench", keep=keep) as (cluster, api):
        with operator_process(cluster.kubeconfig, open_log()) as operator:
            clock = PodClock()
            pods = collection_path("Pod", NAMESPACE)
            informer = Informer(api, pods, selector=names.JOB_NAME, on_change=clock.note)
            following = asyncio.create_task(informer.run())
            await informer.synced.wait()
            await ready()
            yield Rig(api, operator, clock)
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following


@asynccontextmanager
async def fake_cluster(name: str, *, keep: bool) -> AsyncIterator[tuple[ThrowawayCluster, ApiServer]]:
    """Cluster up, kwok nodes, CRD, claims; all ended afterwards."""
    cluster = ThrowawayCluster.named(name)
    cluster.up(node_count=1)
    try:
        start_kwok(cluster, FAKE_NODES)
        cluster.kubectl("apply", "--server-side", "-f", str(REPOSITORY / "manifests" / "crd" / "finetunejobs.yaml"))
        cluster.kubectl("wait", "--for=condition=Established", "crd/finetunejobs.finetune.dev", "--timeout=30s")
        cluster.kubectl.apply(*claims())
        async with connected(cluster.kubeconfig) as api:
            yield cluster, api
    finally:
        if not keep:
            cluster.down(purge=True)


@asynccontextmanager
async def connected(kubeconfig: Path) -> AsyncIterator[ApiServer]:
    access = find_access(kubeconfig=str(kubeconfig))
    async with open_session(access, connections=500) as calls, open_session(access, connections=500) as streams:
        yield ApiServer(access.server, calls=calls, streams=streams)


def open_log() -> IO[bytes]:
    """Where operators write, one after the other."""
    log = tempfile.NamedTemporaryFile(prefix="bench-operator-", suffix=".log", delete=False)  # noqa: SIM115
    print(f"operator log: {log.name}", file=sys.stderr)
    return log


def operator_process(kubeconfig: Path, log: IO[bytes]) -> subprocess.Popen[bytes]:
    """The operator as in development: one process, no election."""
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
    return Stopping(process)  # type: ignore[return-value]


class Stopping:
    """A process that is ended when its block ends."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def __enter__(self) -> subprocess.Popen[bytes]:
        return self.process

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=15)
        except subprocess.TimeoutExpired:  # what went wrong before is worth more than this
            self.process.kill()
            self.process.wait()


async def ready(*, within_seconds: float = 20.0) -> None:
    """Raises TimeoutError."""
    async with asyncio.timeout(within_seconds):
        while not await asyncio.to_thread(answers_ready):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


def answers_ready() -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{METRICS_PORT}/readyz", timeout=1) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def claims() -> tuple[Raw, ...]:
    """The namespace, and one bound claim that every job writes to."""
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
