"""Who makes a soak happen: those who run the jobs, those who take Kubernetes nodes away, and who kills the operator."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from benchmarks.load import JOBS, PODS, Raw, ended_pod, job_body
from benchmarks.rig import NAMESPACE, count_requests, memory_mib, open_log, operator_process, read_metrics, ready
from benchmarks.soak.scripts import GONE, RESTART_POLICY, Act, Plan, how_it_ends
from finetune_operator import names
from finetune_operator.kube.api_client import ApiError, ApiServer
from finetune_operator.kube.cluster import collection_path
from finetune_operator.kube.informer import Informer
from testing.cluster.kwok import render_fake_node

LOOK_SECONDS = 1.0
SAMPLE_SECONDS = 2.0
READY_SECONDS = 120.0  # with hundreds of jobs, on a machine that does much else
NODE_AWAY_SECONDS = 90.0  # longer than pod garbage collection waits
CONFLICT = 409


class Scene:
    """Jobs and pods as the watches tell them; of what is gone the last look."""

    def __init__(self, api: ApiServer) -> None:
        self.api = api
        self.jobs: dict[str, Raw] = {}
        self.deleted: set[str] = set()
        self.pods: dict[str, Raw] = {}

    def watches(self) -> tuple[Informer, ...]:
        """What has to run for it to be kept up to date."""
        return (
            Informer(self.api, JOBS, selector="", on_change=self._job_changed),
            Informer(self.api, collection_path("Pod", NAMESPACE), selector=names.JOB_UID, on_change=self._pod_changed),
        )

    def running_attempt(self, plan: Plan) -> int | None:
        """The job's present attempt, if all its pods run."""
        attempt = self.jobs.get(plan.name, {}).get("status", {}).get("attempt")
        if attempt is None:
            return None
        pods = [self.pods.get(names.pod_name(plan.name, attempt, rank)) for rank in range(plan.nodes)]
        return attempt if all(pod is not None and _runs(pod) for pod in pods) else None

    def end(self, name: str) -> tuple[str, str] | None:
        """Phase and reason of a job that ended."""
        if name in self.deleted:
            return GONE, ""
        status: Raw = self.jobs.get(name, {}).get("status", {})
        held = {c["type"]: c["reason"] for c in status.get("conditions", ()) if c["status"] == "True"}
        return next(((phase, held[phase]) for phase in ("Complete", "Failed") if phase in held), None)

    def restarts(self) -> int:
        """Of all jobs together."""
        return sum(job.get("status", {}).get("restarts", 0) for job in self.jobs.values())

    def _job_changed(self, before: Raw | None, job: Raw | None) -> None:
        if job is not None:
            self.jobs[job["metadata"]["name"]] = job
        elif before is not None:
            self.deleted.add(before["metadata"]["name"])

    def _pod_changed(self, before: Raw | None, pod: Raw | None) -> None:
        if pod is not None:
            self.pods[pod["metadata"]["name"]] = pod
        elif before is not None:
            self.pods.pop(before["metadata"]["name"], None)


def _runs(pod: Raw) -> bool:
    return pod.get("status", {}).get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]


class Player:
    """Plays the scripts: what a kubelet and a trainer would tell, and what users do."""

    def __init__(self, scene: Scene, luck: random.Random, *, deadline: float) -> None:
        self.acts: Counter[str] = Counter()
        self._deadline = deadline  # monotonic; whoever is late hurries then
        self._scene = scene
        self._luck = luck

    async def play(self, plan: Plan) -> None:
        """One job from its POST to its end."""
        await asyncio.sleep(plan.start)
        body = job_body(plan.name, plan.nodes)
        body["spec"]["restartPolicy"] = RESTART_POLICY
        await self._scene.api.call("POST", JOBS, body=body)
        number, last = 0, -1
        while self._scene.end(plan.name) is None:
            attempt = self._scene.running_attempt(plan)
            if attempt is None or attempt == last:
                await asyncio.sleep(LOOK_SECONDS)
                continue
            await asyncio.sleep(max(LOOK_SECONDS, min(plan.run_seconds, self._deadline - time.monotonic())))
            if self._scene.running_attempt(plan) != attempt:
                continue  # something else happened to it
            last = attempt
            act = plan.script.act(number)
            if await self._do(act, plan, attempt):
                self.acts[act] += 1
                number += 1

    async def _do(self, act: Act, plan: Plan, attempt: int) -> bool:
        """False if it was too late."""
        pods = [names.pod_name(plan.name, attempt, rank) for rank in range(plan.nodes)]
        victim = self._luck.choice(pods)
        match act:
            case Act.DELETE_JOB:
                return await self._delete(f"{JOBS}/{plan.name}", {})
            case Act.DELETE_POD:
                return await self._delete(f"{PODS}/{victim}", {})
            case Act.DELETE_POD_BY_FORCE:
                return await self._delete(f"{PODS}/{victim}", {"gracePeriodSeconds": 0})
            case Act.SUCCEED:
                return all(await asyncio.gather(*(self._end(pod, act) for pod in pods)))
        return await self._end(victim, act)

    async def _delete(self, path: str, options: Raw) -> bool:
        body = {"kind": "DeleteOptions", "apiVersion": "v1", **options}
        return await _unless_gone(self._scene.api.call("DELETE", path, body=body))

    async def _end(self, name: str, act: Act) -> bool:
        """The container ends; kwok may change the pod meanwhile."""
        code, reason, message = how_it_ends(act, time=time.time())
        while True:
            pod = self._scene.pods.get(name)
            if pod is None or not _runs(pod):
                return False
            body = ended_pod(pod, code=code, reason=reason, message=message)
            try:
                return await _unless_gone(self._scene.api.call("PUT", f"{PODS}/{name}/status", body=body))
            except ApiError as error:
                if error.status != CONFLICT:
                    raise
                await asyncio.sleep(LOOK_SECONDS)


class Thief:
    """Takes Kubernetes nodes away and brings them back."""

    def __init__(self, api: ApiServer, luck: random.Random) -> None:
        self.taken = 0
        self._api = api
        self._luck = luck
        self._returns: set[asyncio.Task[None]] = set()

    async def take(self, *, count: int, every: float) -> None:
        """One of so many now and then, for ever."""
        while True:
            await asyncio.sleep(every)
            node = dict(render_fake_node(self._luck.randrange(1, count + 1)))
            if await _unless_gone(self._api.call("DELETE", f"/api/v1/nodes/{node['metadata']['name']}")):
                self.taken += 1
                self._returns.add(asyncio.create_task(self._bring_back(node)))

    async def _bring_back(self, node: Raw) -> None:
        await asyncio.sleep(NODE_AWAY_SECONDS)
        await self._api.call("POST", "/api/v1/nodes", body=node)


async def _unless_gone(call: Awaitable[Raw]) -> bool:
    try:
        await call
    except ApiError as error:
        if error.status == 404:
            return False
        raise
    return True


class Keeper:
    """Keeps the operator running, kills it every minute, and writes down what it holds in memory."""

    def __init__(self, kubeconfig: Path) -> None:
        self.kills = 0
        self.samples: list[tuple[float, float]] = []  # seconds since the beginning, MiB
        self.requests: Counter[str] = Counter()
        self.starts: list[float] = []  # seconds until it was ready
        self._kubeconfig = kubeconfig
        self._log = open_log()
        self._began = time.monotonic()

    async def keep(self, *, every: float, killing: Callable[[], bool]) -> None:
        """For ever."""
        while True:
            began = time.monotonic()
            with operator_process(self._kubeconfig, self._log) as process:
                await ready(within_seconds=READY_SECONDS)
                self.starts.append(time.monotonic() - began)
                while time.monotonic() - began < every or not killing():
                    await asyncio.sleep(SAMPLE_SECONDS)
                    self._sample(process)
                self.requests += count_requests(await asyncio.to_thread(read_metrics))
                process.send_signal(signal.SIGKILL)
                self.kills += 1

    def _sample(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is not None:
            raise RuntimeError(f"the operator ended by itself, with exit code {process.returncode}")
        self.samples.append((time.monotonic() - self._began, memory_mib(process.pid)))
