"""Informer: a cache of one API collection that is maintained by LIST and WATCH."""

import asyncio
import logging
import random
import time
from collections.abc import Callable

from finetune_operator.kube.api_client import WATCH_READ_TIMEOUT_SECONDS, ApiClient, ApiError
from finetune_operator.kube.api_paths import ApiPath
from finetune_operator.kube.resource_versions import StateRolledBack, check_version_order
from finetune_operator.observation.ownership import RawBody
from finetune_operator.tasks.error_net import ErrorNet

logger = logging.getLogger(__name__)

INITIAL_BACKOFF_SECONDS = 0.2
MAX_BACKOFF_SECONDS = 10.0
MIN_WATCH_SECONDS = 1.0  # shorter watches count as failures, because some proxies close streams immediately
STATUS_GONE = 410

ChangeHandler = Callable[[RawBody | None, RawBody | None], None]


class Informer:
    """Cache that calls `on_change(old, new)` for every change, with None for a missing old or new object.

    A change of fields that are not cached is not reported.

    After a gap in the watch, a LIST is compared with the cache, so that deletions during the gap are also reported.
    Objects are indexed by uid, so an object that is recreated under its name causes a deletion and an addition.
    """

    def __init__(
        self,
        api: ApiClient,
        path: ApiPath,
        *,
        selector: str,
        on_change: ChangeHandler,
        project: Callable[[RawBody], RawBody] = lambda body: body,
        net: ErrorNet | None = None,
    ) -> None:
        self.path = path
        self.synced = asyncio.Event()
        self.last_contact = time.monotonic()  # time of the last data from the API server
        self.last_activity = self.last_contact  # time of the last data or failed request
        self._api = api
        self._selector = selector
        self._on_change = on_change
        self._project = project  # reduces an object to the fields that are cached
        self._net = net or ErrorNet()
        self._objects: dict[str, RawBody] = {}
        self._version: str | None = None  # resourceVersion of the next watch; None requires a LIST
        self._newest_version = ""  # the last resourceVersion of any response
        self._failures = 0
        self._last_error = ""  # message of the last error, empty after a success

    def replace(self, body: RawBody) -> None:
        """Replace the cached body of this version of an object, for example by a smaller one, without a report."""
        cached = self._objects.get(body["metadata"]["uid"])
        if cached is not None and cached["metadata"]["resourceVersion"] == body["metadata"]["resourceVersion"]:
            self._objects[body["metadata"]["uid"]] = body

    def seconds_since_activity(self) -> float:
        """Return the seconds since the last received data or failed request."""
        return time.monotonic() - self.last_activity

    async def run(self) -> None:
        """List and watch the collection until cancelled.

        Raises:
            StateRolledBack: The API server went back to an earlier state.
        """
        while True:
            started_at = time.monotonic()
            retry_after = 0.0
            try:
                if self._version is None:
                    await self._relist()
                await self._watch()
                self._failures = self._failures + 1 if time.monotonic() - started_at < MIN_WATCH_SECONDS else 0
            except ApiError as error:
                retry_after = error.retry_after or 0.0
                self._handle_error(error)
            except StateRolledBack:
                raise
            except Exception as error:  # an unforeseen response; no activity is recorded, so that liveness fails
                self._net.record(f"watch of {self.path}", error)
                self._failures, self._version = self._failures + 1, None
                await asyncio.sleep(self._compute_backoff_seconds())
                continue
            self.last_activity = time.monotonic()
            await asyncio.sleep(max(retry_after, self._compute_backoff_seconds()))

    async def _relist(self) -> None:
        listed_objects: dict[str, RawBody] = {}
        version = ""
        async for page in self._api.list_pages(self.path, selector=self._selector):
            self._record_contact()
            version = page["metadata"]["resourceVersion"]
            check_version_order(self.path, known_version=self._newest_version, current_version=version)
            kind, api_version = page["kind"].removesuffix("List"), page["apiVersion"]
            for item in page["items"]:  # a LIST omits kind and apiVersion of its items
                body = self._reduce({"kind": kind, "apiVersion": api_version, **item})
                if body is not None:
                    listed_objects[item["metadata"]["uid"]] = body
        for uid in self._objects.keys() - listed_objects.keys():
            self._report(self._objects.pop(uid), None)
        for body in listed_objects.values():
            self._store(body)
        self._version = self._newest_version = version
        self.synced.set()

    async def _watch(self) -> None:
        events = self._api.watch(self.path, selector=self._selector, version=self._version or "")
        async for event in events:
            self._record_contact()
            body = event["object"]
            match event["type"]:
                case "ADDED" | "MODIFIED" if reduced := self._reduce(body):
                    self._store(reduced)
                case "DELETED" if reduced := self._reduce(body):
                    self._remove(reduced)
                case "ERROR":
                    raise ApiError(body.get("message", "watch failed"), status=body.get("code", 500))
            # a BOOKMARK contains only the resourceVersion
            self._version = self._newest_version = body["metadata"]["resourceVersion"]

    def _reduce(self, body: RawBody) -> RawBody | None:
        """Return the fields of an object that are cached. If that fails, return the cached object, if there is one."""
        try:
            return self._project(body)
        except Exception as error:  # an unforeseen object costs only its own change
            self._net.record(f"watch of {self.path}", error, about=str(body["metadata"].get("name")))
            return self._objects.get(body["metadata"]["uid"])

    def _report(self, old_body: RawBody | None, new_body: RawBody | None) -> None:
        try:
            self._on_change(old_body, new_body)
        except Exception as error:  # as in _reduce
            about = str((new_body or old_body or {}).get("metadata", {}).get("name"))
            self._net.record(f"watch of {self.path}", error, about=about)

    def _store(self, body: RawBody) -> None:
        uid = body["metadata"]["uid"]
        cached = self._objects.get(uid)
        if cached is not None and cached["metadata"]["resourceVersion"] == body["metadata"]["resourceVersion"]:
            return
        self._objects[uid] = body
        if cached is None or _without_version(cached) != _without_version(body):
            self._report(cached, body)

    def _remove(self, body: RawBody) -> None:
        """Remove the object and report the body from the watch event, which may be newer than the cached body."""
        if self._objects.pop(body["metadata"]["uid"], None) is not None:
            self._report(body, None)

    def _handle_error(self, error: ApiError) -> None:
        self._failures += 1
        # the error is usually 410 Gone, because the resourceVersion is too old
        if 400 <= error.status < 500 and error.status != 429:
            self._version = None
        # without even a bookmark, the version may be unknown to the API server, which then sends nothing for long
        if time.monotonic() - self.last_contact >= WATCH_READ_TIMEOUT_SECONDS:
            self._version = None
        level = logging.INFO if error.status == STATUS_GONE else logging.WARNING
        if error.message == self._last_error:
            level = logging.DEBUG  # log a persistent error only once
        self._last_error = error.message
        logger.log(level, "%s: %s", self.path, error.message, extra={"failures": self._failures})

    def _record_contact(self) -> None:
        self.last_contact = self.last_activity = time.monotonic()
        self._failures = 0
        self._last_error = ""

    def _compute_backoff_seconds(self) -> float:
        if self._failures == 0:
            return 0.0
        limit = min(MAX_BACKOFF_SECONDS, INITIAL_BACKOFF_SECONDS * 2.0 ** min(self._failures, 20))
        return random.uniform(0.0, limit)  # noqa: S311  full jitter, because replicas and watches fail together


def _without_version(body: RawBody) -> RawBody:
    return {**body, "metadata": {**body["metadata"], "resourceVersion": ""}}
