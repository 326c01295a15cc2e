"""The only module that knows kopf: it hosts the watch of the jobs and nothing else.

kopf writes nothing: a handler of raw events needs no finalizer and no annotation. It keeps the credentials it is given
and stops the process if it fails in a way that trying again does not mend.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import kopf

from finetune_operator import names
from finetune_operator.controller.controller import Controller
from finetune_operator.controller.job_cache import job_key

WATCH_SECONDS = 300  # a whole number: the API server refuses "300.0"
LONGEST_PAUSE = 5.0
RELOGIN_SECONDS = 2.0


@dataclass(frozen=True)
class Host:
    """What kopf needs to watch the jobs."""

    server: str
    open_session: Callable[[], aiohttp.ClientSession]
    namespaces: tuple[str, ...]  # empty: the whole cluster


class PatientBackoff:
    """Pauses without end: an API server that is away for long must not stop the operator."""

    def __iter__(self) -> Iterator[float]:
        pause = 0.25
        while True:
            yield pause
            pause = min(LONGEST_PAUSE, pause * 2)


class NothingStored(kopf.AnnotationsDiffBaseStorage):
    """kopf compares every event's object with its last one, for handlers that do not exist here."""

    def build(self, **_: object) -> kopf.BodyEssence:
        """Nothing to compare; otherwise each event costs a deep copy of the job."""
        return kopf.BodyEssence({})


def build_settings() -> kopf.OperatorSettings:
    """kopf with everything off that is not the watch."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.persistence.diffbase_storage = NothingStored()
    settings.networking.error_backoffs = PatientBackoff()
    settings.networking.request_timeout = 30.0
    settings.networking.connect_timeout = 5.0
    settings.watching.server_timeout = WATCH_SECONDS
    settings.process.ultimate_exiting_timeout = None  # the kubelet's grace period is enough
    return settings


def build_registry(controller: Controller, host: Host) -> kopf.OperatorRegistry:
    """A login and the one handler."""
    registry = kopf.OperatorRegistry()
    last_login = time.monotonic() - RELOGIN_SECONDS

    @kopf.on.login(registry=registry)
    async def log_in(**_: object) -> kopf.AiohttpSession:
        nonlocal last_login
        await asyncio.sleep(last_login + RELOGIN_SECONDS - time.monotonic())  # else every 401 asks again at once
        last_login = time.monotonic()
        return kopf.AiohttpSession(server=host.server, aiohttp_session=host.open_session())

    @kopf.on.event(*names.FINETUNEJOB, registry=registry)
    async def job_changed(event: kopf.RawEvent, **_: object) -> None:
        body = dict(event["object"])
        if event["type"] == "DELETED":
            controller.drop(job_key(body))
        else:
            controller.take(body)

    return registry


async def start_kopf(controller: Controller, host: Host, *, stop: asyncio.Event) -> Collection[asyncio.Task[Any]]:
    """Start watching; what comes back is for run_kopf. kopf takes over the signals here: set handlers afterwards."""
    return await kopf.spawn_tasks(
        registry=build_registry(controller, host),
        settings=build_settings(),
        clusterwide=not host.namespaces,
        namespaces=host.namespaces,
        stop_flag=stop,
    )


async def run_kopf(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Watch until `stop` is set or kopf fails."""
    await kopf.run_tasks(tasks, ignored=asyncio.all_tasks())
