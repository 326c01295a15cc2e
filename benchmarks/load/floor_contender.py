"""Runs jobs without an operator: a plain asynchronous client sends the requests that the jobs need at least."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from benchmarks.load.contender import ControllerMetrics, LoadRig
from benchmarks.load.floor_requests import FloorAttempt, PostRequest, render_attempts, render_status_write
from benchmarks.load.job_bodies import JOBS_PATH, PODS_PATH, RawBody, build_job_body, report_killed_rank
from benchmarks.load.operator_contender import FINETUNEJOB_COLLECTIONS
from benchmarks.load.pod_times import AttemptKey, PodTimes, identify_pod
from finetune_operator import names
from finetune_operator.core.job_context import ABORT_GRACE_SECONDS
from finetune_operator.kube.api_paths import extend_path
from finetune_operator.kube.credentials import find_credentials, open_session
from testing.builders.jobs import UID

CONNECTIONS = 32
DELETE_OPTIONS = json.dumps({"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": ABORT_GRACE_SECONDS})


class FloorClient:
    """Sends requests without retries over at most CONNECTIONS connections."""

    def __init__(self, server: str, session: aiohttp.ClientSession) -> None:
        self._server = server
        self._session = session

    async def send(self, method: str, path: str, content: str) -> bytes:
        """Send a request and return the response.

        Raises: RuntimeError
        """
        headers = {"Content-Type": "application/json"}
        async with self._session.request(
            method, self._server + path, data=content.encode(), headers=headers
        ) as response:
            body = await response.read()
            if response.status >= 400:
                raise RuntimeError(f"{method} {path}: {response.status} {body.decode()}")
            return body


class FloorContender:
    """Creates, deletes and replaces the objects that the operator does, in the same order of steps, in this process."""

    title = "floor"
    pod_label = names.JOB_UID
    collections = FINETUNEJOB_COLLECTIONS

    def __init__(self, rig: LoadRig) -> None:
        self.pod_times = PodTimes()
        self._rig = rig
        self._attempts: dict[str, tuple[FloorAttempt, ...]] = {}
        self._bodies: dict[str, RawBody] = {}  # jobs as the last status write returned them
        self._starts: dict[str, asyncio.Task[None]] = {}
        self._client: FloorClient
        self._tasks: asyncio.TaskGroup

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        credentials = find_credentials(kubeconfig=str(self._rig.cluster.kubeconfig))
        async with open_session(credentials, connections=CONNECTIONS) as session, asyncio.TaskGroup() as self._tasks:
            self._client = FloorClient(credentials.server, session)
            yield

    def prepare(self, jobs: list[str], *, nodes: int) -> None:
        self._attempts |= {job: render_attempts(job, nodes=nodes) for job in jobs}

    async def create_job(self, name: str, *, nodes: int) -> None:
        self._bodies[name] = await self._rig.api.call("POST", JOBS_PATH, body=build_job_body(name, nodes))
        self._starts[name] = self._tasks.create_task(self._start_attempt(name, 0))

    async def report_failure(self, pod: RawBody) -> None:
        await report_killed_rank(self._rig.api, pod)
        self._tasks.create_task(self._restart(identify_pod(pod)[0].job))

    def list_controllers(self) -> tuple[int, ...]:
        return ()

    def read_metrics(self) -> ControllerMetrics:
        return ControllerMetrics()

    async def _start_attempt(self, job: str, attempt: int) -> None:
        requests = self._attempts[job][attempt]
        await self._write_status(job, requests.starting)
        await self._create(job, requests.objects)
        await self._create(job, requests.pods)
        await self.pod_times.wait_until_running(AttemptKey(job, attempt), nodes=len(requests.pods))
        await self._write_status(job, requests.running)

    async def _restart(self, job: str) -> None:
        requests, key = self._attempts[job][0], AttemptKey(job, 0)
        await self._starts[job]
        await self._write_status(job, requests.stopping)
        pods = [pod["metadata"]["name"] for pod in self.pod_times.attempts[key].existing.values()]
        await asyncio.gather(
            *(self._client.send("DELETE", extend_path(PODS_PATH, pod), DELETE_OPTIONS) for pod in pods)
        )
        await self.pod_times.wait_until_deleted(key)
        config_map_path = requests.config_map_path
        await asyncio.gather(self._start_attempt(job, 1), self._client.send("DELETE", config_map_path, DELETE_OPTIONS))

    async def _create(self, job: str, creates: tuple[PostRequest, ...]) -> None:
        uid = self._bodies[job]["metadata"]["uid"]
        await asyncio.gather(
            *(self._client.send("POST", create.path, create.content.replace(UID, uid)) for create in creates)
        )

    async def _write_status(self, job: str, status: str) -> None:
        path = extend_path(JOBS_PATH, job, "status")
        response = await self._client.send(
            "PUT",
            path,
            render_status_write(self._bodies[job], status.replace(UID, self._bodies[job]["metadata"]["uid"])),
        )
        self._bodies[job] = json.loads(response)
