"""Measures the operator's memory with many finished and running jobs, without a cluster.

Starts the operator as a process against the in-memory API server of testing.fakes, waits until it has listed
everything and reconciled every job once, and prints resident and peak memory (VmRSS and VmHWM of /proc).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from benchmarks.rig import (
    NAMESPACE,
    create_operator_log,
    read_metrics,
    start_operator,
    wait_until_operator_ready,
)
from finetune_api.v1alpha1.job import FineTuneJob
from finetune_operator.controller.reconcile import render_status
from finetune_operator.core.decide import decide
from finetune_operator.observation.pods import Observation, observe_pods
from finetune_operator.plan.manifests import build_service
from finetune_operator.plan.pod_manifest import build_pod
from finetune_operator.plan.run_plan import plan_run
from testing.builders.jobs import SETTINGS, spec
from testing.fakes.http_api import HttpApi, serve_api

RawBody = dict[str, Any]
USER_VARIABLES = 20  # with those of the operator, a pod has about 40
MANAGED_FIELDS = [
    {"manager": "finetune-operator", "operation": "Update", "fieldsV1": {f"f:field{n}": {} for n in range(60)}}
]
SETTLE_SECONDS = 5.0
TIME = "2026-01-01T12:00:00Z"


@dataclass(frozen=True)
class MemoryUse:
    """Resident memory and its peak since the start of the process, in MiB."""

    resident_mib: float
    peak_mib: float


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the operator's memory with an in-memory API server.")
    parser.add_argument("--finished", type=int, default=10_000, help="finished two-node jobs (default 10000)")
    parser.add_argument("--running", type=int, default=1_000, help="running two-node jobs (default 1000)")
    options = parser.parse_args()
    use = asyncio.run(measure(finished=options.finished, running=options.running))
    print(f"{options.finished} finished and {options.running} running jobs: ", end="")
    print(f"{use.resident_mib:.0f} MiB resident, {use.peak_mib:.0f} MiB at the peak")
    return 0


async def measure(*, finished: int, running: int) -> MemoryUse:
    """Start the operator with these jobs and return its memory after it has reconciled all of them."""
    api = HttpApi()
    for number in range(finished):
        put_job(api, f"finished-{number}", is_finished=True)
    for number in range(running):
        put_job(api, f"running-{number}", is_finished=False)
    async with serve_api(api) as url:
        with tempfile.TemporaryDirectory() as folder:
            kubeconfig = write_kubeconfig(Path(folder), url)
            with start_operator(kubeconfig, create_operator_log()) as operator:
                await wait_until_operator_ready(timeout_seconds=600)
                await wait_until_idle(jobs=finished + running)
                await asyncio.sleep(SETTLE_SECONDS)
                return read_memory(operator.pid)


def put_job(api: HttpApi, name: str, *, is_finished: bool) -> None:
    """Add a two-node job with its Service and pods, with the status that the operator writes."""
    body = build_job(name)
    job = FineTuneJob.parse(body)
    service = build_service(plan_run(job, attempt=0, settings=SETTINGS))
    pods: list[RawBody] = []
    for phase in ("Pending", "Running", "Running", *(("Succeeded", "Succeeded") if is_finished else ())):
        job, pods = decide_next(job, pods), [build_api_pod(job, rank, phase=phase) for rank in range(2)]
    job = decide_next(job, pods)
    api.put("finetunejobs", {**body, "status": render_status(job.status)}, namespace=NAMESPACE)
    api.put("services", service, namespace=NAMESPACE)
    for pod in pods:
        api.put("pods", pod, namespace=NAMESPACE)


def decide_next(job: FineTuneJob, pods: Iterable[RawBody]) -> FineTuneJob:
    """Return the job with the status of the next decision about these pods."""
    observation = Observation(nodes=observe_pods(pods, ()), service_exists=True, is_fresh=True, claims=())
    status = decide(job, observation, datetime.now(UTC), SETTINGS).status
    return job.model_copy(update={"status": status})


def build_job(name: str) -> RawBody:
    """Return the job as the API server returns it, applied with kubectl."""
    env = [{"name": f"USER_VARIABLE_{number}", "value": f"value number {number}"} for number in range(USER_VARIABLES)]
    job_spec = spec(env=env)
    body = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "metadata": {"name": name}, "spec": job_spec}
    metadata = {
        "name": name,
        "namespace": NAMESPACE,
        "uid": str(uuid.uuid4()),
        "generation": 1,
        "resourceVersion": "1",
        "creationTimestamp": TIME,
        "managedFields": MANAGED_FIELDS,
        "annotations": {"kubectl.kubernetes.io/last-applied-configuration": json.dumps(body)},
    }
    return {**body, "metadata": metadata}


def build_api_pod(job: FineTuneJob, rank: int, *, phase: str) -> RawBody:
    """Return a pod as the API server returns it, with defaults, managed fields and status."""
    run = plan_run(job, attempt=0, settings=SETTINGS)
    pod = build_pod(run, run.nodes[rank])
    uid = str(uuid.uuid5(uuid.UUID(job.metadata.uid), str(rank)))
    metadata = {**pod["metadata"], "uid": uid, "creationTimestamp": TIME, "managedFields": MANAGED_FIELDS}
    conditions = [
        {"type": name, "status": "True", "observedGeneration": 1, "lastProbeTime": None, "lastTransitionTime": TIME}
        for name in ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")
    ]
    container = {
        "name": "trainer",
        "image": "registry.example/trainer:v1",
        "imageID": "registry.example/trainer@sha256:" + "0" * 64,
        "containerID": "containerd://" + "0" * 64,
        "restartCount": 0,
        "state": build_state(phase),
    }
    status = {"phase": phase, "conditions": conditions, "containerStatuses": [container], "podIP": "127.0.0.1"}
    addresses = {"podIPs": [{"ip": "127.0.0.1"}], "hostIP": "10.0.0.1", "hostIPs": [{"ip": "10.0.0.1"}]}
    tolerations = [
        {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
        for key in ("not-ready", "unreachable")
    ]
    pod_spec = {**pod["spec"], "nodeName": f"gpu-{rank}", "tolerations": tolerations, "schedulerName": "default"}
    return {**pod, "metadata": metadata, "spec": pod_spec, "status": {**status, **addresses, "startTime": TIME}}


def build_state(phase: str) -> RawBody:
    """Return the state of the trainer container in a pod of this phase."""
    if phase == "Pending":
        return {"waiting": {"reason": "ContainerCreating"}}
    if phase == "Running":
        return {"running": {"startedAt": TIME}}
    message = json.dumps({"final": True, "outcome": "succeeded", "progress": {"step": 1000, "totalSteps": 1000}})
    return {
        "terminated": {
            "exitCode": 0,
            "reason": "Completed",
            "message": message,
            "startedAt": TIME,
            "finishedAt": TIME,
            "containerID": "containerd://" + "0" * 64,
        }
    }


def write_kubeconfig(folder: Path, url: str) -> Path:
    """Write a kubeconfig for an API server without authentication and return its path."""
    path = folder / "kubeconfig"
    context = {"name": "memory", "context": {"cluster": "memory", "user": "memory"}}
    content = {
        "current-context": "memory",
        "contexts": [context],
        "clusters": [{"name": "memory", "cluster": {"server": url}}],
        "users": [{"name": "memory", "user": {}}],
    }
    path.write_text(yaml.safe_dump(content))
    return path


async def wait_until_idle(*, jobs: int) -> None:
    """Wait until the operator has run a pass for every job and its work queue is empty."""
    async with asyncio.timeout(600):
        while True:
            metrics = await asyncio.to_thread(read_metrics)
            passes = re.findall(r"^finetune_reconcile_seconds_count\{.*\} (\S+)$", metrics, re.MULTILINE)
            depth = re.search(r"^finetune_queue_depth (\S+)$", metrics, re.MULTILINE)
            if sum(map(float, passes)) >= jobs and depth and float(depth[1]) == 0:
                return
            await asyncio.sleep(0.5)


def read_memory(pid: int) -> MemoryUse:
    """Read VmRSS and VmHWM of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    sizes = dict(re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB", status, re.MULTILINE))
    return MemoryUse(int(sizes["VmRSS"]) / 1024, int(sizes["VmHWM"]) / 1024)


if __name__ == "__main__":
    sys.exit(main())
