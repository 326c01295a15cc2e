"""Jobs, failures and the waiting for what follows from them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.rig import NAMESPACE, PodClock, Rig
from finetune_api.v1alpha1.job import FineTuneJob
from finetune_operator import names
from finetune_operator.kube.cluster import collection_path
from finetune_operator.plan.manifests import build_children
from finetune_operator.plan.run_plan import Settings, plan_run

Raw = dict[str, Any]
JOBS = f"/apis/{names.API_VERSION}/namespaces/{NAMESPACE}/{names.FINETUNEJOB[2]}"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
PATIENCE_SECONDS = 600
MERGE_PATCH = "application/merge-patch+json"

KILLED = {
    "final": True,
    "outcome": "failed",
    "rank": 0,
    "errorType": "RankKilled",
    "signal": 9,
    "message": "rank 0 was killed",
}


class Floor:
    """The same objects made by hand, as fast as one client can: what the cluster itself takes, without an operator."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.clock = rig.clock

    async def start_many(self, jobs: list[str], *, nodes: int) -> list[float]:
        """For each job, seconds from the first POST to all its pods running."""
        return await asyncio.gather(*(self._start(job, attempt=0, nodes=nodes) for job in jobs))

    async def restart_many(self, jobs: list[str], *, nodes: int) -> list[float]:
        """The same for the next attempt, once the pods of the first are deleted and gone."""
        return await asyncio.gather(*(self._restart(job, nodes=nodes) for job in jobs))

    async def delete(self, jobs: list[str]) -> None:
        """Everything, so that it does not weigh on what is measured next."""
        for kind in ("Pod", "Service", "ConfigMap"):
            path = collection_path(kind, NAMESPACE)
            options = {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0}
            params = {"labelSelector": f"{names.MANAGED_BY}=nobody"}
            await self.rig.api.call("DELETE", path, body=options, params=params)
        pods = pod_names(jobs, attempt=1, nodes=1)
        await until(self.clock, lambda: self.clock.gone.issuperset(pods), "the floor's pods gone")

    async def _restart(self, job: str, *, nodes: int) -> float:
        began = time.monotonic()
        old = pod_names([job], attempt=0, nodes=nodes)
        options = {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 10}
        await asyncio.gather(*(self.rig.api.call("DELETE", f"{PODS}/{pod}", body=options) for pod in old))
        await until(self.clock, lambda: self.clock.gone.issuperset(old), f"pods of {job} gone")
        return time.monotonic() - began + await self._start(job, attempt=1, nodes=nodes)

    async def _start(self, job: str, *, attempt: int, nodes: int) -> float:
        began = time.monotonic()
        parsed = FineTuneJob.parse({**job_body(job, nodes), "metadata": {"name": job, "namespace": NAMESPACE}})
        children = build_children(plan_run(parsed, attempt=attempt, settings=Settings(trainer_image="localhost/none")))
        await asyncio.gather(*(self._create(child) for child in children if child["kind"] != "Service" or not attempt))
        pods = pod_names([job], attempt=attempt, nodes=nodes)
        await until(self.clock, lambda: all(pod in self.clock.running for pod in pods), f"pods of {job} running")
        return max(self.clock.running[pod] for pod in pods) - began

    async def _create(self, manifest: Raw) -> None:
        """Owned by nobody and labelled as of no job, so that no operator hears of it."""
        metadata = {**manifest["metadata"], "ownerReferences": []}
        ours = {key: value for key, value in metadata["labels"].items() if key != names.JOB_UID}
        metadata["labels"] = {**ours, names.MANAGED_BY: "nobody"}
        await self.rig.api.call(
            "POST", collection_path(manifest["kind"], NAMESPACE), body={**manifest, "metadata": metadata}
        )


class Load:
    """Puts work on a rig and takes the time."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.clock = rig.clock

    async def start_to_created(self, name: str, *, nodes: int) -> float:
        """Seconds from POST to the last pod seen."""
        began = await self.post(name, nodes=nodes)
        pods = pod_names([name], attempt=0, nodes=nodes)
        await self.until(lambda: all(pod in self.clock.created for pod in pods), f"pods of {name} created")
        return max(self.clock.created[pod] for pod in pods) - began

    async def all_running(self, jobs: Iterable[str], *, attempt: int, nodes: int) -> dict[str, float]:
        """When the last pod of each job ran."""
        jobs = list(jobs)
        pods = pod_names(jobs, attempt=attempt, nodes=nodes)
        await self.until(lambda: all(pod in self.clock.running for pod in pods), f"attempt {attempt} running")
        return {
            job: max(self.clock.running[pod] for pod in pod_names([job], attempt=attempt, nodes=nodes)) for job in jobs
        }

    async def restart(self, name: str, *, nodes: int) -> float:
        """Seconds from the end of one node to all pods of the next attempt running."""
        began = await self.fail(name)
        return (await self.all_running([name], attempt=1, nodes=nodes))[name] - began

    async def start_many(self, jobs: list[str], *, nodes: int) -> list[float]:
        """For each job, seconds from its POST to all its pods running; all are posted at once."""
        began = dict(zip(jobs, await asyncio.gather(*(self.post(job, nodes=nodes) for job in jobs)), strict=True))
        running = await self.all_running(jobs, attempt=0, nodes=nodes)
        return [running[job] - began[job] for job in jobs]

    async def restart_many(self, jobs: list[str], *, nodes: int) -> list[float]:
        """The same from the end of one node of each job, all at once."""
        began = dict(zip(jobs, await asyncio.gather(*(self.fail(job) for job in jobs)), strict=True))
        running = await self.all_running(jobs, attempt=1, nodes=nodes)
        return [running[job] - began[job] for job in jobs]

    async def post(self, name: str, *, nodes: int) -> float:
        began = time.monotonic()
        await self.rig.api.call("POST", JOBS, body=job_body(name, nodes))
        return began

    async def fail(self, name: str) -> float:
        """One node's trainer ends as if a rank had been killed."""
        pod = f"{name}-0-0"
        message = json.dumps({**KILLED, "time": time.time()})
        body = ended_pod(self.clock.pods[pod], code=1, reason="Error", message=message)
        began = time.monotonic()
        await self.rig.api.call("PUT", f"{PODS}/{pod}/status", body=body)
        return began

    async def delete(self, jobs: Iterable[str]) -> None:
        await asyncio.gather(*(self.rig.api.call("DELETE", f"{JOBS}/{job}") for job in jobs))

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        await until(self.clock, holds, what)


async def until(clock: PodClock, holds: Callable[[], bool], what: str) -> None:
    """Wait for the clock to show it; raises TimeoutError."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        clock.changed.clear()
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"not within {PATIENCE_SECONDS} s: {what}")
        try:
            await asyncio.wait_for(clock.changed.wait(), timeout=min(left, 1.0))
        except TimeoutError:
            continue


def pod_names(jobs: Iterable[str], *, attempt: int, nodes: int) -> list[str]:
    return [names.pod_name(job, attempt, rank) for job in jobs for rank in range(nodes)]


def job_body(name: str, nodes: int) -> Raw:
    """A job whose pods go to kwok's nodes."""
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


def ended_pod(pod: Raw, *, code: int, reason: str, message: str) -> Raw:
    """The pod as its kubelet would report it once the trainer has ended."""
    told = (pod["status"].get("containerStatuses") or [{}])[0]
    container = {
        "image": "none",
        "imageID": "",
        "restartCount": 0,
        **told,
        "name": names.CONTAINER,
        "ready": False,
        "started": False,
        "state": {"terminated": {"exitCode": code, "reason": reason, "message": message}},
    }
    phase = "Failed" if code else "Succeeded"
    return {**pod, "status": {**pod["status"], "phase": phase, "containerStatuses": [container]}}
