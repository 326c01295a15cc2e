"""Asks the running jobs how far they are. No answer fails nobody: a busy pod is well. Long silence is told."""

import asyncio
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import aiohttp
from pydantic import ValidationError

from finetune_api.v1alpha1.status import Progress
from finetune_operator import names
from finetune_operator.controller.child_cache import Children, JobKey
from finetune_operator.controller.job_cache import Jobs
from finetune_operator.kube.api_client import Raw

logger = logging.getLogger(__name__)

INTERVAL = 10.0
AT_ONCE = 64
TIMEOUT = aiohttp.ClientTimeout(total=2)
LARGEST_ANSWER = 64 * 1024
SILENCE = 120.0  # seconds, after which it is no busy pod any more but something in the way


@dataclass(frozen=True)
class Question:
    """Whom to ask about which job."""

    key: JobKey
    address: str


@dataclass(frozen=True)
class Answer:
    """Of a pod that was reached; it may have nothing to tell yet."""

    progress: Progress | None


class ProgressPoller:
    """Keeps the newest progress of every job and tells which jobs advanced."""

    def __init__(
        self,
        jobs: Jobs,
        children: Children,
        *,
        on_progress: Callable[[JobKey], None],
        port: int = names.STATUS_PORT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._jobs = jobs
        self._children = children
        self._on_progress = on_progress
        self._port = port
        self._clock = clock
        self._newest: dict[JobKey, Progress] = {}
        self._silent: dict[JobKey, tuple[str, float]] = {}  # who did not answer last time, and since when
        self._unheard: dict[JobKey, str] = {}

    def newest(self, key: JobKey) -> Progress | None:
        """The last answer of any of the job's attempts."""
        return self._newest.get(key)

    def unheard(self, key: JobKey) -> str:
        """Host and port that have given no answer for long; empty if there is nothing to complain of."""
        return self._unheard.get(key, "")

    def forget(self, key: JobKey) -> None:
        """The job is gone."""
        self._newest.pop(key, None)
        self._forget_silence(key)

    async def run(self, *, interval: float = INTERVAL) -> None:
        """Ask everybody, again and again."""
        connector = aiohttp.TCPConnector(limit=AT_ONCE, force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=TIMEOUT) as session:
            while True:
                await self.ask_all(session)
                await asyncio.sleep(interval)

    async def ask_all(self, session: aiohttp.ClientSession) -> None:
        """One round."""
        turns = asyncio.Semaphore(AT_ONCE)  # before the timeout starts, unlike the connector's limit

        async def ask_one(question: Question) -> None:
            async with turns:
                answer = await ask(session, f"http://{question.address}/status")
            if question.key not in self._jobs:
                return
            self._note_silence(question, heard=answer is not None)
            if answer is not None and answer.progress is not None:
                self._take(question.key, answer.progress)

        questions = self._questions()
        for key in self._silent.keys() - {question.key for question in questions}:  # nothing of theirs runs any more
            self._forget_silence(key)
        await asyncio.gather(*(ask_one(question) for question in questions))

    def _questions(self) -> list[Question]:
        found = ((key, find_address(self._children.pods(key), self._jobs.attempt(key))) for key in self._jobs)
        return [Question(key, f"{host}:{self._port}") for key, host in found if host]

    def _note_silence(self, question: Question, *, heard: bool) -> None:
        key, now = question.key, self._clock()
        address, since = self._silent.get(key, ("", now))
        if heard:
            self._silent.pop(key, None)
        elif address != question.address:
            self._silent[key] = question.address, now
        unheard = "" if heard or address != question.address or now - since < SILENCE else address
        if unheard != self.unheard(key):
            self._unheard[key] = unheard
            self._on_progress(key)

    def _forget_silence(self, key: JobKey) -> None:
        self._silent.pop(key, None)
        self._unheard.pop(key, None)

    def _take(self, key: JobKey, progress: Progress) -> None:
        before = self._newest.get(key)
        self._newest[key] = progress
        if before is None or _without_time(before) != _without_time(progress):
            self._on_progress(key)


async def ask(session: aiohttp.ClientSession, url: str) -> Answer | None:
    """What one pod answers, or None; it is the user's code that answers, so nothing it says can hurt."""
    try:
        async with session.get(url, allow_redirects=False) as response:
            if response.status != 200:
                return Answer(None)
            content = await response.content.readexactly(LARGEST_ANSWER)
    except asyncio.IncompleteReadError as ended:
        content = ended.partial
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        logger.debug("%s: %s", url, error)
        return None
    return Answer(parse_status(content, now=datetime.now(UTC)))


def parse_status(content: bytes, *, now: datetime) -> Progress | None:
    """The progress in a supervisor's /status, stamped with `now` if it has no time of its own."""
    try:
        said = json.loads(content)
        progress = Progress.model_validate(said.get("progress")) if isinstance(said, dict) else None
    except (ValueError, ValidationError, RecursionError):
        return None
    if progress is None:
        return None
    return progress.model_copy(update={"update_time": progress.update_time or now})


def find_address(pods: tuple[Raw, ...], attempt: int | None) -> str | None:
    """Where node rank 0 of the present attempt answers, if it runs."""
    for pod in pods:
        labels, status = pod["metadata"].get("labels", {}), pod.get("status", {})
        mine = labels.get(names.NODE_RANK) == "0" and labels.get(names.ATTEMPT) == str(attempt)
        if mine and status.get("phase") == "Running" and (address := status.get("podIP")):
            return f"[{address}]" if ":" in address else str(address)
    return None


def _without_time(progress: Progress) -> Progress:
    return progress.model_copy(update={"update_time": None})
