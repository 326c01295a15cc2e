"""The objects of one collection as the API server has them, kept by LIST, diff and WATCH."""

import asyncio
import logging
import random
import time
from collections.abc import Callable

from finetune_operator.kube.api_client import ApiError, ApiServer, Raw

logger = logging.getLogger(__name__)

FIRST_PAUSE = 0.2
LONGEST_PAUSE = 10.0
SHORT_WATCH = 1.0  # seconds; a stream that ends sooner is no success, else an eager proxy makes this loop spin
GONE = 410

Change = Callable[[Raw | None, Raw | None], None]


class Informer:
    """Tells every change as (before, after), where None stands for "not there".

    A LIST after a gap is compared with what is known, so that a deletion that nobody told is told all the same. Objects
    are known by uid: one that was replaced under its name is a deletion and an addition.
    """

    def __init__(self, api: ApiServer, path: str, *, selector: str, on_change: Change) -> None:
        self.path = path
        self.synced = asyncio.Event()
        self.last_contact = time.monotonic()  # with the API server
        self.last_activity = self.last_contact  # of this loop, to which a failed try counts
        self._api = api
        self._selector = selector
        self._on_change = on_change
        self._objects: dict[str, Raw] = {}
        self._version: str | None = None  # where the next watch begins; None asks for a LIST
        self._failures = 0
        self._complaint = ""  # of the last try, if it failed

    def silent_seconds(self) -> float:
        """How long this loop has shown no sign of life."""
        return time.monotonic() - self.last_activity

    async def run(self) -> None:
        """Follow the collection for ever."""
        while True:
            began = time.monotonic()
            retry_after = 0.0
            try:
                if self._version is None:
                    await self._relist()
                await self._follow()
                self._failures = self._failures + 1 if time.monotonic() - began < SHORT_WATCH else 0
            except ApiError as error:
                retry_after = error.retry_after or 0.0
                self._give_up_stream(error)
            self.last_activity = time.monotonic()
            await asyncio.sleep(max(retry_after, self._pause()))

    async def _relist(self) -> None:
        found: dict[str, Raw] = {}
        version = ""
        async for page in self._api.pages(self.path, selector=self._selector):
            self._contact()
            version = page["metadata"]["resourceVersion"]
            kind, api_version = page["kind"].removesuffix("List"), page["apiVersion"]
            for item in page["items"]:  # items of a list come without their type
                found[item["metadata"]["uid"]] = {"kind": kind, "apiVersion": api_version, **item}
        for uid in self._objects.keys() - found.keys():
            self._on_change(self._objects.pop(uid), None)
        for body in found.values():
            self._store(body)
        self._version = version
        self.synced.set()

    async def _follow(self) -> None:
        events = self._api.watch(self.path, selector=self._selector, version=self._version or "")
        async for event in events:
            self._contact()
            body = event["object"]
            match event["type"]:
                case "ADDED" | "MODIFIED":
                    self._store(body)
                case "DELETED":
                    self._remove(body)
                case "ERROR":
                    raise ApiError(body.get("message", "watch failed"), status=body.get("code", 500))
            self._version = body["metadata"]["resourceVersion"]  # a BOOKMARK has this and nothing else

    def _store(self, body: Raw) -> None:
        body["metadata"].pop("managedFields", None)  # half of a pod's bytes, and nobody reads it
        uid = body["metadata"]["uid"]
        before = self._objects.get(uid)
        if before is None or before["metadata"]["resourceVersion"] != body["metadata"]["resourceVersion"]:
            self._objects[uid] = body
            self._on_change(before, body)

    def _remove(self, body: Raw) -> None:
        """The event carries the last state, which may be newer than the one we know."""
        body["metadata"].pop("managedFields", None)
        if self._objects.pop(body["metadata"]["uid"], None) is not None:
            self._on_change(body, None)

    def _give_up_stream(self, error: ApiError) -> None:
        self._failures += 1
        if 400 <= error.status < 500 and error.status != 429:  # 410 above all: what we hold is too old to go on from
            self._version = None
        level = logging.INFO if error.status == GONE else logging.WARNING
        if error.message == self._complaint:
            level = logging.DEBUG  # said once, for as long as it lasts
        self._complaint = error.message
        logger.log(level, "%s: %s", self.path, error.message, extra={"failures": self._failures})

    def _contact(self) -> None:
        self.last_contact = self.last_activity = time.monotonic()
        self._failures = 0
        self._complaint = ""

    def _pause(self) -> float:
        if self._failures == 0:
            return 0.0
        longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(self._failures, 20))
        return random.uniform(0.0, longest)  # noqa: S311  full jitter: replicas and watches fail together
