"""Watches the jobs with kopf. No other module imports kopf.

kopf writes nothing to the cluster, because a handler for raw events needs no finalizer or annotation. It uses the
session that `log_in` returns, and stops the process on errors that a retry cannot fix.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import kopf

from finetune_operator import names
from finetune_operator.controller.controller import JOB_PAGE_SIZE, Controller
from finetune_operator.controller.job_cache import get_job_key

logger = logging.getLogger(__name__)
WATCH_GENERATORS = ("infinite_watch", "streaming_block")  # names of functions of kopf

WATCH_SECONDS = 300  # must be an integer, because the API server rejects "300.0"
MAX_BACKOFF_SECONDS = 5.0
RELOGIN_SECONDS = 2.0
WORKER_IDLE_SECONDS = 0.2


@dataclass(frozen=True)
class KopfOptions:
    """API server, session and namespaces of the watch."""

    server: str
    open_session: Callable[[], aiohttp.ClientSession]
    namespaces: tuple[str, ...]  # empty to watch all namespaces


class EndlessBackoff:
    """Infinite sequence of backoff delays, so that a long outage of the API server does not stop the operator."""

    def __iter__(self) -> Iterator[float]:
        delay = 0.25
        while True:
            yield delay
            delay = min(MAX_BACKOFF_SECONDS, delay * 2)


class NoDiffBaseStorage(kopf.AnnotationsDiffBaseStorage):
    """Disables the comparison of every object with its previous version, which the handlers do not need."""

    def build(self, **_: object) -> kopf.BodyEssence:
        """Return an empty essence, which avoids a deep copy of the job for every event."""
        return kopf.BodyEssence({})


def build_settings() -> kopf.OperatorSettings:
    """Return kopf settings that disable all features except the watch."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.persistence.diffbase_storage = NoDiffBaseStorage()
    settings.networking.error_backoffs = EndlessBackoff()
    settings.networking.request_timeout = 30.0
    settings.networking.connect_timeout = 5.0
    settings.watching.server_timeout = WATCH_SECONDS
    settings.watching.chunk_size = JOB_PAGE_SIZE
    # kopf keeps a task per job until this time after the last event; the first LIST starts one for every job
    settings.queueing.idle_timeout = WORKER_IDLE_SECONDS
    # no shutdown timeout is needed, because the grace period of the pod limits the shutdown
    settings.process.ultimate_exiting_timeout = None
    return settings


def build_registry(controller: Controller, options: KopfOptions) -> kopf.OperatorRegistry:
    """Return a registry with the login handler and the event handler."""
    registry = kopf.OperatorRegistry()
    last_login = time.monotonic() - RELOGIN_SECONDS

    @kopf.on.login(registry=registry)
    async def log_in(**_: object) -> kopf.AiohttpSession:
        nonlocal last_login
        # Without this delay, kopf would log in again at once after every 401.
        await asyncio.sleep(last_login + RELOGIN_SECONDS - time.monotonic())
        last_login = time.monotonic()
        return kopf.AiohttpSession(server=options.server, aiohttp_session=options.open_session())

    @kopf.on.event(*names.FINETUNEJOB, registry=registry)
    async def job_changed(event: kopf.RawEvent, **_: object) -> None:
        body = dict(event["object"])
        if event["type"] == "DELETED":
            controller.on_job_deleted(get_job_key(body))
        else:
            controller.on_job_event(body)

    return registry


async def start_kopf(
    controller: Controller, options: KopfOptions, *, stop_event: asyncio.Event
) -> Collection[asyncio.Task[Any]]:
    """Start the watch and return its tasks for `run_kopf`. kopf replaces the signal handlers of the process."""
    return await kopf.spawn_tasks(
        registry=build_registry(controller, options),
        settings=build_settings(),
        clusterwide=not options.namespaces,
        namespaces=options.namespaces,
        stop_flag=stop_event,
    )


def handle_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error of the event loop, except those of kopf's watch generators when the process ends.

    asyncio closes the generators that remain at its end, in any order. If kopf was handling an event, one of its
    generators raises an error then, which has no effect.
    """
    generator = context.get("asyncgen")
    if getattr(generator, "__name__", "") in WATCH_GENERATORS:
        logger.debug("kopf's watch generator was closed at the end of the process")
        return
    loop.default_exception_handler(context)


async def run_kopf(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Watch the jobs until `stop_event` is set or kopf fails."""
    await kopf.run_tasks(tasks, ignored=asyncio.all_tasks())
