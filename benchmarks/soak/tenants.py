"""Interference by other tenants and by users: pods with foreign labels, edited and deleted Services, deleted pods."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable

from benchmarks.load.job_bodies import PODS_PATH, RawBody
from benchmarks.rig import NAMESPACE
from benchmarks.soak.requests import NOT_FOUND, call, create, delete, update
from benchmarks.soak.state import AttemptKey, SoakState, get_attempt, get_job_uid, is_running
from finetune_operator import names
from finetune_operator.kube.api_client import ApiClient, ApiError
from finetune_operator.kube.api_paths import collection_path, extend_path
from finetune_operator.plan.manifests import is_intact_headless_service

STRANGER = "soak-stranger"  # label of the pods that another tenant creates
STRANGER_SECONDS = 30.0
REPAIR_TIMEOUT_SECONDS = 120.0  # includes a pause of the operator and the election of another leader
SERVICES_PATH = collection_path("Service", NAMESPACE)


class Tenants:
    """Interferes with a random running job once per interval; requires that the operator repairs edited Services."""

    def __init__(self, api: ApiClient, state: SoakState, random_source: random.Random) -> None:
        self._api = api
        self.acts: Counter[str] = Counter()
        self._state = state
        self._random_source = random_source
        self._followups: set[asyncio.Task[None]] = set()
        self._acts: tuple[tuple[str, Callable[[RawBody], Awaitable[bool]]], ...] = (
            ("pods with the labels of a job created", self._create_stranger),
            ("Services edited", self._edit_service),
            ("Services deleted", self._delete_service),
            ("pods deleted", self._delete_pod),
        )

    async def run(self, *, interval_seconds: float) -> None:
        """Interfere until cancelled."""
        while True:
            await asyncio.sleep(interval_seconds)
            pods = [pod for pod in self._state.pods.values() if is_running(pod) and get_job_uid(pod)]
            if pods:
                title, act = self._random_source.choice(self._acts)
                if await act(self._random_source.choice(pods)):
                    self.acts[title] += 1

    async def clean_up(self) -> None:
        """End the checks of repaired Services, and delete the pods that remain."""
        if self._followups:
            await asyncio.wait(self._followups, timeout=REPAIR_TIMEOUT_SECONDS)
        for pod in list(self._state.pods.values()):
            if STRANGER in pod["metadata"]["labels"]:
                await delete(self._api, extend_path(PODS_PATH, pod["metadata"]["name"]), gracePeriodSeconds=0)

    async def _create_stranger(self, pod: RawBody) -> bool:
        name = f"stranger-{self._random_source.randrange(10**9)}"
        stranger = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": {**pod["metadata"]["labels"], STRANGER: "true"}},
            "spec": {
                "containers": [{"name": names.CONTAINER, "image": "localhost/stranger"}],
                "nodeSelector": {"type": "kwok"},
                "tolerations": [{"operator": "Exists"}],
            },
        }
        await create(self._api, PODS_PATH, stranger)
        self._follow_up(self._delete_stranger(name))
        return True

    async def _delete_stranger(self, name: str) -> None:
        await asyncio.sleep(STRANGER_SECONDS)
        await delete(self._api, extend_path(PODS_PATH, name), gracePeriodSeconds=0)

    async def _edit_service(self, pod: RawBody) -> bool:
        edited = {"selector": {"app": "stranger"}, "publishNotReadyAddresses": False}
        path = extend_path(SERVICES_PATH, self._get_job_name(pod))
        is_edited = await update(self._api, path, lambda body: {**body, "spec": {**body["spec"], **edited}})
        if is_edited:
            self._follow_up(self._require_service(self._get_job_name(pod), get_job_uid(pod)))
        return is_edited

    async def _delete_service(self, pod: RawBody) -> bool:
        is_deleted = await delete(self._api, extend_path(SERVICES_PATH, self._get_job_name(pod)))
        if is_deleted:
            self._follow_up(self._require_service(self._get_job_name(pod), get_job_uid(pod)))
        return is_deleted

    async def _delete_pod(self, pod: RawBody) -> bool:
        key: AttemptKey = (get_job_uid(pod), get_attempt(pod))
        self._state.add_cause(key, "a tenant deletes a pod")
        return await delete(self._api, extend_path(PODS_PATH, pod["metadata"]["name"]))

    async def _require_service(self, name: str, uid: str) -> None:
        """Require that the job has an intact Service in time, unless it no longer runs."""
        deadline = time.monotonic() + REPAIR_TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            await asyncio.sleep(1.0)
            runs = self._state.get_uid(name) == uid and not self._state.find_final_state(name)
            if not runs or self._state.has_condition(name, "Suspended"):
                return
            try:
                service = await call(self._api, "GET", extend_path(SERVICES_PATH, name))
            except ApiError as error:
                if error.status != NOT_FOUND:
                    raise
            else:
                if is_intact_headless_service(service, uid):
                    return
        self._state.problems.append(f"Service {name} is not repaired after {REPAIR_TIMEOUT_SECONDS:.0f} s")

    def _follow_up(self, coroutine: Awaitable[None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._followups.add(task)
        task.add_done_callback(self._end_followup)

    def _end_followup(self, task: asyncio.Task[None]) -> None:
        self._followups.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._state.problems.append(f"a check of a tenant's change failed: {error!r}")

    @staticmethod
    def _get_job_name(pod: RawBody) -> str:
        name: str = pod["metadata"]["labels"][names.JOB_NAME]
        return name
