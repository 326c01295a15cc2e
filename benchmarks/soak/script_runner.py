"""Runs the scripts of the jobs: status reports of kubelets and trainers, and requests of the jobs' users."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable

from benchmarks.load.job_bodies import JOBS_PATH, PODS_PATH, build_job_body, build_terminated_pod
from benchmarks.soak.requests import CONFLICT, NOT_FOUND, call, create, delete, update
from benchmarks.soak.scripts import RESTART_POLICY, SUSPENSIONS, JobPlan, ScriptAction, build_container_exit
from benchmarks.soak.state import SUSPENSION, AttemptKey, SoakState, get_shm_bytes, is_running
from finetune_api.v1alpha1.quantity import parse_quantity
from finetune_operator import names
from finetune_operator.kube.api_client import ApiClient, ApiError
from finetune_operator.kube.api_paths import extend_path

POLL_INTERVAL_SECONDS = 1.0
SUSPENSION_TIMEOUT_SECONDS = 180.0  # includes a pause of the operator and the election of another leader
MAX_SUSPENDED_SECONDS = 20.0
FLIP_SECONDS = 0.3
RESTARTING_ACTIONS = (
    ScriptAction.KILL_RANK,
    ScriptAction.KILL_CONTAINER,
    ScriptAction.EXIT_EARLY,
    ScriptAction.FILL_GPU,
    ScriptAction.DELETE_POD,
    ScriptAction.FORCE_DELETE_POD,
)


class ScriptRunner:
    """Runs at most `at_once` scripts at the same time and counts the performed actions."""

    def __init__(
        self, api: ApiClient, state: SoakState, random_source: random.Random, *, deadline: float, at_once: int
    ) -> None:
        self._api = api
        self.actions: Counter[str] = Counter()
        self.started = 0
        self._deadline = deadline  # monotonic time after which actions are performed without delay
        self._state = state
        self._random_source = random_source
        self._slots = asyncio.Semaphore(at_once)

    async def run_script(self, plan: JobPlan) -> None:
        """Run the script of one job from the creation of the job until it has finished."""
        await asyncio.sleep(plan.start_seconds)
        async with self._slots:
            if time.monotonic() > self._deadline:
                return  # all slots were in use until the end of the test
            self.started += 1
            await self._create_job(plan)
            await self._run_actions(plan)

    async def _create_job(self, plan: JobPlan) -> None:
        body = build_job_body(plan.name, plan.nodes)
        body["spec"]["restartPolicy"] = RESTART_POLICY
        if plan.ttl_seconds is not None:
            body["spec"]["ttlSecondsAfterFinished"] = plan.ttl_seconds
        created = await create(self._api, JOBS_PATH, body)
        while self._state.get_uid(plan.name) != created["metadata"]["uid"]:  # noqa: ASYNC110  informer event
            await asyncio.sleep(0.1)

    async def _run_actions(self, plan: JobPlan) -> None:
        state = self._state
        action_number, last_attempt = 0, None
        while state.find_final_state(plan.name) is None:
            attempt = state.find_running_attempt(plan)
            if attempt is None or attempt == last_attempt:
                await asyncio.sleep(POLL_INTERVAL_SECONDS)
                continue
            await asyncio.sleep(max(POLL_INTERVAL_SECONDS, min(plan.run_seconds, self._deadline - time.monotonic())))
            if state.find_running_attempt(plan) != attempt:
                continue  # the attempt has ended because of another fault
            action = plan.script.get_action(action_number)
            # an operator that is paused does not observe a flip, so that the attempt goes on
            last_attempt = None if action is ScriptAction.FLIP else attempt
            if await self._perform(action, plan, attempt):
                self.actions[action] += 1
                action_number += 1

    async def _perform(self, action: ScriptAction, plan: JobPlan, attempt: AttemptKey) -> bool:
        """Perform the action; return False if the attempt has already ended."""
        if action in SUSPENSIONS:
            return await self._suspend_and_resume(action, plan, attempt)
        if action is ScriptAction.SUCCEED:
            pods = [names.pod_name(plan.name, attempt[1], rank) for rank in range(plan.nodes)]
            return all(await asyncio.gather(*(self._end_container(pod, action) for pod in pods)))
        self._state.add_cause(attempt, action)
        if action in RESTARTING_ACTIONS:
            self._state.failed_at[attempt] = time.monotonic()
        victim = names.pod_name(plan.name, attempt[1], self._random_source.randrange(plan.nodes))
        api = self._api
        match action:
            case ScriptAction.DELETE_JOB:
                return await delete(api, extend_path(JOBS_PATH, plan.name))
            case ScriptAction.RECREATE_JOB:
                await delete(api, extend_path(JOBS_PATH, plan.name))
                await self._create_job(plan)
                return True
            case ScriptAction.DELETE_POD:
                return await delete(api, extend_path(PODS_PATH, victim))
            case ScriptAction.FORCE_DELETE_POD:
                return await delete(api, extend_path(PODS_PATH, victim), gracePeriodSeconds=0)
        return await self._end_container(victim, action)

    async def _suspend_and_resume(self, action: ScriptAction, plan: JobPlan, attempt: AttemptKey) -> bool:
        self._state.add_cause(attempt, SUSPENSION)
        await self._change_spec(plan, suspend=True)
        if action is ScriptAction.FLIP:
            await asyncio.sleep(FLIP_SECONDS)
        else:
            if not await self._wait_until(lambda: self._is_suspended(plan)):
                self._state.problems.append(f"{plan.name} is not suspended after {SUSPENSION_TIMEOUT_SECONDS:.0f} s")
            await asyncio.sleep(self._random_source.uniform(0, MAX_SUSPENDED_SECONDS))
        is_edited = action is ScriptAction.EDIT and self._state.has_condition(plan.name, "Suspended")
        shm_size = f"{self._random_source.randrange(100, 1000)}Mi"
        if is_edited:
            await self._change_spec(plan, shmSize=shm_size)
        await self._change_spec(plan, suspend=False)
        if is_edited:
            await self._check_edit(plan, shm_size)
        return True

    def _is_suspended(self, plan: JobPlan) -> bool:
        state = self._state
        return state.has_condition(plan.name, "Suspended") or state.find_final_state(plan.name) is not None

    async def _check_edit(self, plan: JobPlan, shm_size: str) -> None:
        state = self._state
        if not await self._wait_until(
            lambda: state.find_running_attempt(plan) is not None or state.find_final_state(plan.name) is not None
        ):
            state.problems.append(f"{plan.name} does not run {SUSPENSION_TIMEOUT_SECONDS:.0f} s after it was resumed")
            return
        attempt = state.find_running_attempt(plan)
        if attempt is None:
            return
        pod = state.pods[names.pod_name(plan.name, attempt[1], 0)]
        expected = int(parse_quantity(shm_size))
        if get_shm_bytes(pod) != expected:
            state.problems.append(f"{pod['metadata']['name']} has shm {get_shm_bytes(pod)}, edited to {expected}")

    async def _wait_until(self, predicate: Callable[[], bool]) -> bool:
        """Return whether the predicate becomes true in time."""
        deadline = time.monotonic() + SUSPENSION_TIMEOUT_SECONDS
        while not predicate():
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(POLL_INTERVAL_SECONDS)
        return True

    async def _change_spec(self, plan: JobPlan, **fields: object) -> None:
        path = extend_path(JOBS_PATH, plan.name)
        await update(self._api, path, lambda job: {**job, "spec": {**job["spec"], **fields}})

    async def _end_container(self, pod_name: str, action: ScriptAction) -> bool:
        """Report that the container has exited; retry after a conflict, because kwok may also modify the pod."""
        exit_code, reason, message = build_container_exit(action, time=time.time())
        while True:
            pod = self._state.pods.get(pod_name)
            if pod is None or not is_running(pod):
                return False
            body = build_terminated_pod(pod, exit_code=exit_code, reason=reason, message=message)
            try:
                await call(self._api, "PUT", extend_path(PODS_PATH, pod_name, "status"), body=body)
                return True
            except ApiError as error:
                if error.status == NOT_FOUND:
                    return False
                if error.status != CONFLICT:
                    raise
                await asyncio.sleep(POLL_INTERVAL_SECONDS)
