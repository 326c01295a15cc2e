"""Simulated kubelet: ends the containers of pods that kwok has started, and deletes terminating pods."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Coroutine, Mapping
from typing import Any

from benchmarks.load.job_bodies import KILLED_RANK_TERMINATION, PODS_PATH, build_terminated_pod
from benchmarks.queue.job_plans import JobAction, QueuedJob
from benchmarks.soak.requests import delete, update
from finetune_operator import names
from finetune_operator.kube.api_paths import extend_path

MIN_STOP_SECONDS, MAX_STOP_SECONDS = 0.2, 1.5  # from SIGTERM until the container has exited
SIGTERM_EXIT_CODE = 143

RawBody = dict[str, Any]
AttemptId = tuple[str, str]  # job and attempt


class SimulatedKubelet:
    """Ends containers as the plans of their jobs require, by writing the status of their pods.

    The nodes of an attempt end together, `run_seconds` after the last of them has started. `problems` contains the
    exceptions of its tasks.
    """

    def __init__(self, api: Any, plans: Mapping[str, QueuedJob], random_source: random.Random) -> None:
        self.problems: list[str] = []
        self.failed_jobs: set[str] = set()  # jobs of which a rank was killed
        self._api = api
        self._plans = plans
        self._random_source = random_source
        self._pods: dict[AttemptId, dict[str, RawBody]] = {}
        self._started: set[AttemptId] = set()
        self._terminated: set[str] = set()  # uids of pods that are being terminated
        self._tasks: set[asyncio.Task[None]] = set()

    def on_pod_event(self, old_pod: RawBody | None, new_pod: RawBody | None) -> None:
        """Record a pod event of an informer, and begin to terminate the pod or to run its attempt."""
        pod = new_pod or old_pod or {}
        labels, metadata = pod["metadata"]["labels"], pod["metadata"]
        attempt = (labels[names.JOB_NAME], labels[names.ATTEMPT])
        pods = self._pods.setdefault(attempt, {})
        if new_pod is None:
            pods.pop(metadata["name"], None)
            return
        pods[metadata["name"]] = pod
        if "deletionTimestamp" in metadata:
            if pod["spec"].get("nodeName") and metadata["uid"] not in self._terminated:
                self._terminated.add(metadata["uid"])
                self._start_task(self._terminate(pod))
        elif attempt not in self._started and self._is_running(attempt):
            self._started.add(attempt)
            self._start_task(self._run_attempt(attempt))

    async def stop(self) -> None:
        """Cancel all tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._finish_task)

    def _finish_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.problems.append(f"simulated kubelet: {error!r}")

    def _is_running(self, attempt: AttemptId) -> bool:
        pods = self._pods[attempt].values()
        return len(pods) == self._plans[attempt[0]].nodes and all(is_running(pod) for pod in pods)

    async def _run_attempt(self, attempt: AttemptId) -> None:
        plan = self._plans[attempt[0]]
        fails = plan.action is JobAction.FAIL and plan.name not in self.failed_jobs
        await asyncio.sleep(plan.action_seconds if fails else plan.run_seconds)
        if not self._is_running(attempt):
            return  # the attempt is being stopped
        pods = sorted(self._pods[attempt])
        if fails:
            self.failed_jobs.add(plan.name)
            message = {**KILLED_RANK_TERMINATION, "time": time.time()}
            await self._end_container(self._random_source.choice(pods), exit_code=1, message=message)
            return
        message = {"final": True, "outcome": "succeeded", "time": time.time()}
        await asyncio.gather(*(self._end_container(pod, exit_code=0, message=message) for pod in pods))

    async def _terminate(self, pod: RawBody) -> None:
        """End the container after SIGTERM, then confirm the deletion of the pod."""
        if pod.get("status", {}).get("phase") in ("Pending", "Running"):
            await asyncio.sleep(self._random_source.uniform(MIN_STOP_SECONDS, MAX_STOP_SECONDS))
            message = {"final": True, "outcome": "stopped", "time": time.time()}
            await self._end_container(pod["metadata"]["name"], exit_code=SIGTERM_EXIT_CODE, message=message)
        await delete(self._api, extend_path(PODS_PATH, pod["metadata"]["name"]), gracePeriodSeconds=0)

    async def _end_container(self, pod_name: str, *, exit_code: int, message: RawBody) -> None:
        """Write the status of a terminated container, unless it has ended before."""

        def end(pod: RawBody) -> RawBody:
            if pod["status"].get("phase") not in ("Pending", "Running"):
                return pod
            reason = "Error" if exit_code else "Completed"
            return build_terminated_pod(pod, exit_code=exit_code, reason=reason, message=json.dumps(message))

        await update(self._api, extend_path(PODS_PATH, pod_name, "status"), end)


def is_running(pod: RawBody) -> bool:
    return pod.get("status", {}).get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
