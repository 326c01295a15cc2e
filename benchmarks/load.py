"""Measures how long jobs take until all their pods run, after their creation and after a failure."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.rig import NAMESPACE, PodTimes, Rig
from finetune_api.v1alpha1.job import FineTuneJob
from finetune_operator import names
from finetune_operator.kube.cluster import collection_path
from finetune_operator.plan.manifests import build_children
from finetune_operator.plan.run_plan import plan_run
from finetune_operator.settings import Settings

RawBody = dict[str, Any]
JOBS_PATH = f"/apis/{names.API_VERSION}/namespaces/{NAMESPACE}/{names.FINETUNEJOB[2]}"
PODS_PATH = f"/api/v1/namespaces/{NAMESPACE}/pods"
TIMEOUT_SECONDS = 600
MERGE_PATCH = "application/merge-patch+json"

KILLED_RANK_TERMINATION = {
    "final": True,
    "outcome": "failed",
    "rank": 0,
    "errorType": "RankKilled",
    "signal": 9,
    "message": "rank 0 was killed",
}


class BaselineBenchmark:
    """Measures the speed of the cluster by creating the objects of jobs without an operator."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.pod_times = rig.pod_times

    async def measure_starts(self, jobs: list[str], *, nodes: int) -> list[float]:
        """Start all jobs at once; return the seconds from the first POST of each job until all its pods run."""
        return await asyncio.gather(*(self._start(job, attempt=0, nodes=nodes) for job in jobs))

    async def measure_restarts(self, jobs: list[str], *, nodes: int) -> list[float]:
        """Delete the pods of all jobs and start the next attempts; return the duration per job in seconds."""
        return await asyncio.gather(*(self._restart(job, nodes=nodes) for job in jobs))

    async def delete(self, jobs: list[str]) -> None:
        """Delete all objects, so that they do not affect the next measurement."""
        for kind in ("Pod", "Service", "ConfigMap"):
            path = collection_path(kind, NAMESPACE)
            options = {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0}
            params = {"labelSelector": f"{names.MANAGED_BY}=baseline"}
            await self.rig.api.call("DELETE", path, body=options, params=params)
        pods = list_pod_names(jobs, attempt=1, nodes=1)
        await wait_until(
            self.pod_times, lambda: self.pod_times.deleted_names.issuperset(pods), "pods of the baseline deleted"
        )

    async def _restart(self, job: str, *, nodes: int) -> float:
        started_at = time.monotonic()
        old_pods = list_pod_names([job], attempt=0, nodes=nodes)
        options = {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 10}
        await asyncio.gather(*(self.rig.api.call("DELETE", f"{PODS_PATH}/{pod}", body=options) for pod in old_pods))
        await wait_until(
            self.pod_times, lambda: self.pod_times.deleted_names.issuperset(old_pods), f"pods of {job} deleted"
        )
        return time.monotonic() - started_at + await self._start(job, attempt=1, nodes=nodes)

    async def _start(self, job: str, *, attempt: int, nodes: int) -> float:
        started_at = time.monotonic()
        children = [
            child
            for child in build_baseline_children(job, attempt=attempt, nodes=nodes)
            if child["kind"] != "Service" or not attempt
        ]
        await asyncio.gather(*(self._create(child) for child in children))
        pods = list_pod_names([job], attempt=attempt, nodes=nodes)
        await wait_until(
            self.pod_times, lambda: all(pod in self.pod_times.running_at for pod in pods), f"pods of {job} running"
        )
        return max(self.pod_times.running_at[pod] for pod in pods) - started_at

    async def _create(self, manifest: RawBody) -> None:
        await self.rig.api.call("POST", collection_path(manifest["kind"], NAMESPACE), body=manifest)


def build_baseline_children(job: str, *, attempt: int, nodes: int) -> list[RawBody]:
    """Build the objects of one attempt without owner reference and job label, so that the operator ignores them."""
    metadata = {"name": job, "namespace": NAMESPACE, "uid": str(uuid.uuid5(uuid.NAMESPACE_DNS, job))}
    parsed = FineTuneJob.parse({**build_job_body(job, nodes), "metadata": metadata})
    children = build_children(plan_run(parsed, attempt=attempt, settings=Settings(trainer_image="localhost/none")))
    return [_remove_owner(child) for child in children]


def _remove_owner(manifest: RawBody) -> RawBody:
    metadata = {**manifest["metadata"], "ownerReferences": []}
    labels = {key: value for key, value in metadata["labels"].items() if key != names.JOB_UID}
    metadata["labels"] = {**labels, names.MANAGED_BY: "baseline"}
    return {**manifest, "metadata": metadata}


class OperatorBenchmark:
    """Measures how fast the operator starts jobs and restarts failed jobs."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.pod_times = rig.pod_times

    async def measure_creation(self, name: str, *, nodes: int) -> float:
        """Create a job; return the seconds from the POST request until its last pod is observed."""
        started_at = await self.create_job(name, nodes=nodes)
        pods = list_pod_names([name], attempt=0, nodes=nodes)
        await self.wait_until(lambda: all(pod in self.pod_times.created_at for pod in pods), f"pods of {name} created")
        return max(self.pod_times.created_at[pod] for pod in pods) - started_at

    async def wait_until_running(self, jobs: Iterable[str], *, attempt: int, nodes: int) -> dict[str, float]:
        """Wait until all pods run; return the time at which the last pod of each job was running."""
        jobs = list(jobs)
        pods = list_pod_names(jobs, attempt=attempt, nodes=nodes)
        await self.wait_until(
            lambda: all(pod in self.pod_times.running_at for pod in pods), f"attempt {attempt} running"
        )
        return {
            job: max(self.pod_times.running_at[pod] for pod in list_pod_names([job], attempt=attempt, nodes=nodes))
            for job in jobs
        }

    async def measure_restart(self, name: str, *, nodes: int) -> float:
        """Fail one node; return the seconds until all pods of the next attempt run."""
        started_at = await self.report_killed_rank(name)
        return (await self.wait_until_running([name], attempt=1, nodes=nodes))[name] - started_at

    async def measure_starts(self, jobs: list[str], *, nodes: int) -> list[float]:
        """Create all jobs at once; return the seconds from the POST request of each job until all its pods run."""
        start_times = await asyncio.gather(*(self.create_job(job, nodes=nodes) for job in jobs))
        started_at = dict(zip(jobs, start_times, strict=True))
        running = await self.wait_until_running(jobs, attempt=0, nodes=nodes)
        return [running[job] - started_at[job] for job in jobs]

    async def measure_restarts(self, jobs: list[str], *, nodes: int) -> list[float]:
        """Fail one node of each job at once; return the seconds until all pods of the next attempt run."""
        start_times = await asyncio.gather(*(self.report_killed_rank(job) for job in jobs))
        started_at = dict(zip(jobs, start_times, strict=True))
        running = await self.wait_until_running(jobs, attempt=1, nodes=nodes)
        return [running[job] - started_at[job] for job in jobs]

    async def create_job(self, name: str, *, nodes: int) -> float:
        started_at = time.monotonic()
        await self.rig.api.call("POST", JOBS_PATH, body=build_job_body(name, nodes))
        return started_at

    async def report_killed_rank(self, name: str) -> float:
        """Report that a rank of node 0 was killed; return the time of the request."""
        pod = f"{name}-0-0"
        message = json.dumps({**KILLED_RANK_TERMINATION, "time": time.time()})
        body = build_terminated_pod(self.pod_times.pods[pod], exit_code=1, reason="Error", message=message)
        started_at = time.monotonic()
        await self.rig.api.call("PUT", f"{PODS_PATH}/{pod}/status", body=body)
        return started_at

    async def delete(self, jobs: Iterable[str]) -> None:
        await asyncio.gather(*(self.rig.api.call("DELETE", f"{JOBS_PATH}/{job}") for job in jobs))

    async def wait_until(self, predicate: Callable[[], bool], goal: str) -> None:
        await wait_until(self.pod_times, predicate, goal)


async def wait_until(pod_times: PodTimes, predicate: Callable[[], bool], goal: str) -> None:
    """Wait until the pod times satisfy the predicate.

    Raises: TimeoutError
    """
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not predicate():
        pod_times.changed.clear()
        remaining_seconds = deadline - time.monotonic()
        if remaining_seconds <= 0:
            raise TimeoutError(f"not within {TIMEOUT_SECONDS} s: {goal}")
        try:
            await asyncio.wait_for(pod_times.changed.wait(), timeout=min(remaining_seconds, 1.0))
        except TimeoutError:
            continue


def list_pod_names(jobs: Iterable[str], *, attempt: int, nodes: int) -> list[str]:
    return [names.pod_name(job, attempt, rank) for job in jobs for rank in range(nodes)]


def build_job_body(name: str, nodes: int) -> RawBody:
    """Return the body of a job whose pods run on kwok nodes."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.FINETUNEJOB_KIND,
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "model": {"name": "/output/model"},
            "dataset": {"train": [{"name": "/output/train.jsonl"}], "numWorkers": 0},
            "sft": {},
            "numNodes": nodes,
            "output": {"persistentVolumeClaim": {"claimName": "models"}},
            "podTemplate": {"nodeSelector": {"type": "kwok"}, "tolerations": [{"operator": "Exists"}]},
        },
    }


def build_terminated_pod(pod: RawBody, *, exit_code: int, reason: str, message: str) -> RawBody:
    """Return the pod with the status that a kubelet reports after the trainer has exited."""
    reported_status = (pod["status"].get("containerStatuses") or [{}])[0]
    container = {
        "image": "none",
        "imageID": "",
        "restartCount": 0,
        **reported_status,
        "name": names.CONTAINER,
        "ready": False,
        "started": False,
        "state": {"terminated": {"exitCode": exit_code, "reason": reason, "message": message}},
    }
    phase = "Failed" if exit_code else "Succeeded"
    return {**pod, "status": {**pod["status"], "phase": phase, "containerStatuses": [container]}}
