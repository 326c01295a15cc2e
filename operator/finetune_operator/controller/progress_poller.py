"""Polls the training progress from node rank 0. A missing response is reported, but never fails a job."""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain, repeat

import aiohttp
from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from finetune_api.untrusted_json import parse_untrusted_json
from finetune_api.v1alpha1.base import MESSAGE_CONFIG
from finetune_api.v1alpha1.status import Progress
from finetune_operator import names
from finetune_operator.controller.child_cache import ChildCache, JobKey
from finetune_operator.controller.job_cache import JobCache
from finetune_operator.observation.ownership import JobOwner, RawBody, is_controlled
from finetune_operator.tasks.error_net import ErrorNet
from finetune_operator.tasks.fair_slots import FairSlots
from finetune_supervisor.messages import Degradation

logger = logging.getLogger(__name__)

POLL_INTERVAL_SECONDS = 10.0
MAX_CONCURRENT_POLLS = 64
POLL_TIMEOUT = aiohttp.ClientTimeout(total=2)
MAX_RESPONSE_BYTES = 64 * 1024
UNREACHABLE_AFTER_SECONDS = 120.0  # a longer silence is usually caused by a network policy, not by load


@dataclasses.dataclass(frozen=True)
class PollTarget:
    """Key and attempt of a job, and `host:port` of its node rank 0."""

    key: JobKey
    attempt: int
    endpoint: str


@dataclass(config=MESSAGE_CONFIG, frozen=True)
class StatusBody:
    """Fields of a /status response that the operator reads; uid and attempt identify the pod that sent it."""

    uid: str
    attempt: int
    progress: Progress | None = None
    degraded: tuple[Degradation, ...] = ()


_STATUS_BODY = TypeAdapter(StatusBody)


@dataclasses.dataclass(frozen=True)
class PolledDegradations:
    """What slows an attempt down, as its node rank 0 reported."""

    attempt: int
    degraded: tuple[Degradation, ...]


@dataclasses.dataclass(frozen=True)
class StatusResponse:
    """Response of a reachable pod to a poll.

    progress: None before the first step, and for a command that does not report its progress.
    degraded: None if the response is not that of the attempt.
    """

    progress: Progress | None = None
    degraded: tuple[Degradation, ...] | None = None


class ProgressPoller:
    """Keeps the latest progress of every job and calls `on_progress` for each job whose progress changed."""

    def __init__(
        self,
        jobs: JobCache,
        children: ChildCache,
        *,
        on_progress: Callable[[JobKey], None],
        port: int = names.STATUS_PORT,
        clock: Callable[[], float] = time.monotonic,
        net: ErrorNet | None = None,
    ) -> None:
        self._net = net or ErrorNet()
        self._jobs = jobs
        self._children = children
        self._on_progress = on_progress
        self._port = port
        self._clock = clock
        self._latest: dict[JobKey, Progress] = {}
        self._degraded: dict[JobKey, PolledDegradations] = {}
        self._failing_since: dict[JobKey, tuple[str, float]] = {}  # endpoint and time of its first failed poll
        self._unreachable: dict[JobKey, str] = {}

    def get_latest_progress(self, key: JobKey) -> Progress | None:
        """Return the latest polled progress, which may belong to an earlier attempt."""
        return self._latest.get(key)

    def get_degradations(self, key: JobKey) -> PolledDegradations | None:
        """Return the latest polled degradations, which may belong to an earlier attempt; None before the first poll."""
        return self._degraded.get(key)

    def get_unreachable_endpoint(self, key: JobKey) -> str:
        """Return the `host:port` that has not responded for two minutes, or an empty string."""
        return self._unreachable.get(key, "")

    def forget(self, key: JobKey) -> None:
        """Drop the state of a deleted job."""
        self._latest.pop(key, None)
        self._degraded.pop(key, None)
        self._clear_failures(key)

    async def run(self, *, interval_seconds: float = POLL_INTERVAL_SECONDS) -> None:
        """Poll all jobs every `interval_seconds`, until cancelled.

        Pods that did not respond to their last poll are polled separately, so that they do not delay the others.
        """
        connector = aiohttp.TCPConnector(limit=2 * MAX_CONCURRENT_POLLS, force_close=True)

        async def poll_repeatedly(name: str, selects: Callable[[JobKey], bool]) -> None:
            delays = chain((0.0,), repeat(interval_seconds))
            await self._net.repeat(name, lambda: self.poll_all(session, selects=selects), lambda: next(delays))

        async with (
            aiohttp.ClientSession(connector=connector, timeout=POLL_TIMEOUT) as session,
            asyncio.TaskGroup() as group,
        ):
            group.create_task(poll_repeatedly("polls", lambda key: key not in self._failing_since))
            group.create_task(poll_repeatedly("polls of silent pods", lambda key: key in self._failing_since))

    async def poll_all(
        self, session: aiohttp.ClientSession, *, selects: Callable[[JobKey], bool] = lambda _: True
    ) -> None:
        """Poll node rank 0 of every running job that is selected once."""
        # the request timeout includes waiting for a free connection, but not waiting for a slot
        slots = FairSlots(MAX_CONCURRENT_POLLS)

        async def poll(target: PollTarget) -> None:
            try:
                async with slots.hold(target.key.namespace):
                    url = f"http://{target.endpoint}/status"
                    response = await fetch_status(session, url, job_uid=target.key.uid, attempt=target.attempt)
                if target.key in self._jobs:
                    self._store_response(target, response)
            except Exception as error:  # an unforeseen response costs only its own job this round
                self._net.record("polls", error, about=f"{target.key.namespace}/{target.key.uid}")

        targets = self._find_targets()
        # jobs whose node rank 0 no longer runs are not unreachable
        for key in self._failing_since.keys() - {target.key for target in targets}:
            self._clear_failures(key)
        await asyncio.gather(*(poll(target) for target in targets if selects(target.key)))

    def _store_response(self, target: PollTarget, response: StatusResponse | None) -> None:
        self._update_reachability(target, has_response=response is not None)
        if response is not None and response.degraded is not None:
            self._store_report(target, response.progress, response.degraded)

    def _find_targets(self) -> list[PollTarget]:
        targets = []
        for key in self._jobs:
            attempt = self._jobs.current_attempt(key)
            if attempt is None:
                continue
            job = self._jobs.get_identity(key)
            pods = tuple(pod for pod in self._children.pods(key) if self._jobs.is_current_pod(key, pod))
            host = find_rank_zero_host(pods, job=job, attempt=attempt)
            if host is not None:
                port = find_rank_zero_port(pods, job=job, attempt=attempt) or self._port
                targets.append(PollTarget(key, attempt, f"{host}:{port}"))
        return targets

    def _update_reachability(self, target: PollTarget, *, has_response: bool) -> None:
        key, now = target.key, self._clock()
        endpoint, since = self._failing_since.get(key, ("", now))
        if has_response:
            self._failing_since.pop(key, None)
        elif endpoint != target.endpoint:
            self._failing_since[key] = target.endpoint, now
        is_reachable = has_response or endpoint != target.endpoint or now - since < UNREACHABLE_AFTER_SECONDS
        unreachable = "" if is_reachable else endpoint
        if unreachable != self.get_unreachable_endpoint(key):
            self._unreachable[key] = unreachable
            self._on_progress(key)

    def _clear_failures(self, key: JobKey) -> None:
        self._failing_since.pop(key, None)
        self._unreachable.pop(key, None)

    def _store_report(self, target: PollTarget, progress: Progress | None, degraded: tuple[Degradation, ...]) -> None:
        key, report = target.key, PolledDegradations(target.attempt, degraded)
        has_changed = report != self._degraded.get(key, PolledDegradations(target.attempt, ()))
        self._degraded[key] = report
        if progress is not None:
            previous = self._latest.get(key)
            has_changed |= previous is None or _without_update_time(previous) != _without_update_time(progress)
            self._latest[key] = progress
        if has_changed:
            self._on_progress(key)


async def fetch_status(
    session: aiohttp.ClientSession, url: str, *, job_uid: str, attempt: int
) -> StatusResponse | None:
    """Fetch /status of a pod, or return None if it does not respond. User code can forge the response.

    A response with another uid or attempt contains no progress: another pod may have the address by now.
    """
    try:
        async with session.get(url, allow_redirects=False) as response:
            if response.status != 200:
                return StatusResponse()
            content = await response.content.readexactly(MAX_RESPONSE_BYTES)
    except asyncio.IncompleteReadError as error:
        content = error.partial
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        logger.debug("%s: %s", url, error)
        return None
    return parse_status(content, job_uid=job_uid, attempt=attempt, now=datetime.now(UTC))


def parse_status(content: bytes, *, job_uid: str, attempt: int, now: datetime) -> StatusResponse:
    """Parse a /status response; if the progress has no update time, `now` is used instead."""
    body = parse_untrusted_json(_STATUS_BODY, content)
    if body is None or (body.uid, body.attempt) != (job_uid, attempt):
        return StatusResponse()
    progress = body.progress and replace(body.progress, update_time=body.progress.update_time or now)
    return StatusResponse(progress, body.degraded)


def find_rank_zero_host(pods: tuple[RawBody, ...], *, job: JobOwner, attempt: int) -> str | None:
    """Return the IP address of node rank 0, with brackets if it is IPv6; None if its pod is not running."""
    status = _find_rank_zero_pod(pods, job=job, attempt=attempt).get("status", {})
    if status.get("phase") == "Running" and (address := status.get("podIP")):
        return f"[{address}]" if ":" in address else str(address)
    return None


def find_rank_zero_port(pods: tuple[RawBody, ...], *, job: JobOwner, attempt: int) -> int | None:
    """Return the status port of node rank 0 on the network of its Kubernetes node; None on a network of its own."""
    spec = _find_rank_zero_pod(pods, job=job, attempt=attempt).get("spec") or {}
    if not spec.get("hostNetwork"):
        return None
    containers: list[RawBody] = spec.get("containers") or []
    trainer = next((each for each in containers if each.get("name") == names.CONTAINER), RawBody())
    ports = (each for each in trainer.get("ports") or () if each.get("name") == names.STATUS_PORT_NAME)
    return next((each.get("containerPort") for each in ports), None)


def _find_rank_zero_pod(pods: tuple[RawBody, ...], *, job: JobOwner, attempt: int) -> RawBody:
    """Return the pod of node rank 0, {} if there is none.

    Labels alone do not identify the pod: whoever may create pods can set them.
    """
    name = names.pod_name(job.name, attempt, 0)
    return next((pod for pod in pods if pod["metadata"]["name"] == name and is_controlled(pod, job)), {})


def _without_update_time(progress: Progress) -> Progress:
    return replace(progress, update_time=None)
