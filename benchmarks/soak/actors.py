"""Concurrent tasks of a soak test: run the scripts of the jobs, remove Kubernetes nodes and kill the operator."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from benchmarks.load.job_bodies import JOBS_PATH, PODS_PATH, RawBody, build_job_body, build_terminated_pod
from benchmarks.rig import (
    NAMESPACE,
    count_requests,
    create_operator_log,
    read_memory_mib,
    read_metrics,
    start_operator,
    wait_until_operator_ready,
)
from benchmarks.soak.scripts import DELETED, RESTART_POLICY, JobPlan, ScriptAction, build_container_exit
from finetune_operator import names
from finetune_operator.kube.api_client import ApiClient, ApiError
from finetune_operator.kube.cluster import collection_path
from finetune_operator.kube.informer import Informer
from testing.cluster.kwok import render_fake_node

POLL_INTERVAL_SECONDS = 1.0
SAMPLE_INTERVAL_SECONDS = 2.0
READY_TIMEOUT_SECONDS = 120.0  # sufficient for hundreds of jobs on a busy host
NODE_ABSENCE_SECONDS = 90.0  # longer than the period of pod garbage collection
STATUS_CONFLICT = 409


class SoakState:
    """Jobs and pods as last observed by the informers, including the last state of deleted jobs."""

    def __init__(self, api: ApiClient) -> None:
        self.api = api
        self.jobs: dict[str, RawBody] = {}
        self.deleted: set[str] = set()
        self.pods: dict[str, RawBody] = {}

    def build_informers(self) -> tuple[Informer, ...]:
        """Return the informers that keep the state up to date."""
        return (
            Informer(self.api, JOBS_PATH, selector="", on_change=self._on_job_event),
            Informer(self.api, collection_path("Pod", NAMESPACE), selector=names.JOB_UID, on_change=self._on_pod_event),
        )

    def find_running_attempt(self, plan: JobPlan) -> int | None:
        """Return the number of the current attempt if all its pods run, otherwise None."""
        attempt = self.jobs.get(plan.name, {}).get("status", {}).get("attempt")
        if attempt is None:
            return None
        pods = [self.pods.get(names.pod_name(plan.name, attempt, rank)) for rank in range(plan.nodes)]
        return attempt if all(pod is not None and _is_running(pod) for pod in pods) else None

    def find_final_state(self, name: str) -> tuple[str, str] | None:
        """Return the phase and reason of a finished job, or None if the job has not finished."""
        if name in self.deleted:
            return DELETED, ""
        status: RawBody = self.jobs.get(name, {}).get("status", {})
        true_conditions = {c["type"]: c["reason"] for c in status.get("conditions", ()) if c["status"] == "True"}
        return next(
            ((phase, true_conditions[phase]) for phase in ("Complete", "Failed") if phase in true_conditions), None
        )

    def count_restarts(self) -> int:
        """Return the number of restarts of all jobs."""
        return sum(job.get("status", {}).get("restarts", 0) for job in self.jobs.values())

    def _on_job_event(self, old_job: RawBody | None, new_job: RawBody | None) -> None:
        if new_job is not None:
            self.jobs[new_job["metadata"]["name"]] = new_job
        elif old_job is not None:
            self.deleted.add(old_job["metadata"]["name"])

    def _on_pod_event(self, old_pod: RawBody | None, new_pod: RawBody | None) -> None:
        if new_pod is not None:
            self.pods[new_pod["metadata"]["name"]] = new_pod
        elif old_pod is not None:
            self.pods.pop(old_pod["metadata"]["name"], None)


def _is_running(pod: RawBody) -> bool:
    return pod.get("status", {}).get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]


class ScriptRunner:
    """Runs the scripts by simulating status reports of kubelet and trainer and deletions by users."""

    def __init__(self, state: SoakState, random_source: random.Random, *, deadline: float) -> None:
        self.actions: Counter[str] = Counter()
        self._deadline = deadline  # monotonic time after which actions are performed without delay
        self._state = state
        self._random_source = random_source

    async def run_script(self, plan: JobPlan) -> None:
        """Run the script of one job from the creation of the job until it has finished."""
        await asyncio.sleep(plan.start_seconds)
        body = build_job_body(plan.name, plan.nodes)
        body["spec"]["restartPolicy"] = RESTART_POLICY
        await self._state.api.call("POST", JOBS_PATH, body=body)
        action_number, last_attempt = 0, -1
        while self._state.find_final_state(plan.name) is None:
            attempt = self._state.find_running_attempt(plan)
            if attempt is None or attempt == last_attempt:
                await asyncio.sleep(POLL_INTERVAL_SECONDS)
                continue
            await asyncio.sleep(max(POLL_INTERVAL_SECONDS, min(plan.run_seconds, self._deadline - time.monotonic())))
            if self._state.find_running_attempt(plan) != attempt:
                continue  # the attempt has ended because of another fault
            last_attempt = attempt
            action = plan.script.get_action(action_number)
            if await self._perform(action, plan, attempt):
                self.actions[action] += 1
                action_number += 1

    async def _perform(self, action: ScriptAction, plan: JobPlan, attempt: int) -> bool:
        """Perform the action; return False if the attempt has already ended."""
        pods = [names.pod_name(plan.name, attempt, rank) for rank in range(plan.nodes)]
        victim = self._random_source.choice(pods)
        match action:
            case ScriptAction.DELETE_JOB:
                return await self._delete(f"{JOBS_PATH}/{plan.name}", {})
            case ScriptAction.DELETE_POD:
                return await self._delete(f"{PODS_PATH}/{victim}", {})
            case ScriptAction.FORCE_DELETE_POD:
                return await self._delete(f"{PODS_PATH}/{victim}", {"gracePeriodSeconds": 0})
            case ScriptAction.SUCCEED:
                return all(await asyncio.gather(*(self._end_container(pod, action) for pod in pods)))
        return await self._end_container(victim, action)

    async def _delete(self, path: str, options: RawBody) -> bool:
        body = {"kind": "DeleteOptions", "apiVersion": "v1", **options}
        return await _ignore_not_found(self._state.api.call("DELETE", path, body=body))

    async def _end_container(self, pod_name: str, action: ScriptAction) -> bool:
        """Report that the container has exited; retry after a conflict, because kwok may also modify the pod."""
        exit_code, reason, message = build_container_exit(action, time=time.time())
        while True:
            pod = self._state.pods.get(pod_name)
            if pod is None or not _is_running(pod):
                return False
            body = build_terminated_pod(pod, exit_code=exit_code, reason=reason, message=message)
            try:
                return await _ignore_not_found(self._state.api.call("PUT", f"{PODS_PATH}/{pod_name}/status", body=body))
            except ApiError as error:
                if error.status != STATUS_CONFLICT:
                    raise
                await asyncio.sleep(POLL_INTERVAL_SECONDS)


class NodeRemover:
    """Deletes Kubernetes nodes and recreates them after a delay."""

    def __init__(self, api: ApiClient, random_source: random.Random) -> None:
        self.removed_count = 0
        self._api = api
        self._random_source = random_source
        self._recreate_tasks: set[asyncio.Task[None]] = set()

    async def run(self, *, node_count: int, interval_seconds: float) -> None:
        """Delete one of `node_count` nodes per interval until cancelled."""
        while True:
            await asyncio.sleep(interval_seconds)
            node = dict(render_fake_node(self._random_source.randrange(1, node_count + 1)))
            if await _ignore_not_found(self._api.call("DELETE", f"/api/v1/nodes/{node['metadata']['name']}")):
                self.removed_count += 1
                self._recreate_tasks.add(asyncio.create_task(self._recreate(node)))

    async def _recreate(self, node: RawBody) -> None:
        await asyncio.sleep(NODE_ABSENCE_SECONDS)
        await self._api.call("POST", "/api/v1/nodes", body=node)


async def _ignore_not_found(call: Awaitable[RawBody]) -> bool:
    try:
        await call
    except ApiError as error:
        if error.status == 404:
            return False
        raise
    return True


class OperatorRunner:
    """Runs the operator, kills it periodically, and records its memory."""

    def __init__(self, kubeconfig: Path) -> None:
        self.kills = 0
        self.memory_samples: list[tuple[float, float]] = []  # (seconds since the start of the test, MiB)
        self.requests: Counter[str] = Counter()
        self.startup_seconds: list[float] = []  # time from each start until ready
        self._kubeconfig = kubeconfig
        self._log = create_operator_log()
        self._started_at = time.monotonic()

    async def run_operators(self, *, interval_seconds: float, may_kill: Callable[[], bool]) -> None:
        """Run one operator process after another until cancelled."""
        while True:
            started_at = time.monotonic()
            with start_operator(self._kubeconfig, self._log) as process:
                await wait_until_operator_ready(timeout_seconds=READY_TIMEOUT_SECONDS)
                self.startup_seconds.append(time.monotonic() - started_at)
                while time.monotonic() - started_at < interval_seconds or not may_kill():
                    await asyncio.sleep(SAMPLE_INTERVAL_SECONDS)
                    self._sample_memory(process)
                self.requests += count_requests(await asyncio.to_thread(read_metrics))
                process.send_signal(signal.SIGKILL)
                self.kills += 1

    def _sample_memory(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is not None:
            raise RuntimeError(f"the operator exited unexpectedly with code {process.returncode}")
        self.memory_samples.append((time.monotonic() - self._started_at, read_memory_mib(process.pid)))
