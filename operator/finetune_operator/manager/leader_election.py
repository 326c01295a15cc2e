"""One replica acts at a time: whoever holds the Lease. The others watch, warm, and wait for it."""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from finetune_operator.kube.api_client import ApiError, ApiServer, Raw

logger = logging.getLogger(__name__)

LEASE_SECONDS = 15.0
RENEW_DEADLINE = 10.0  # the others wait LEASE_SECONDS: the difference is for clocks that run apart
RETRY_SECONDS = 2.0
REQUEST_SECONDS = 4.0


@dataclass(frozen=True)
class LeaseName:
    """Which Lease, and under which name this replica holds it."""

    namespace: str
    name: str
    identity: str


class LeaderElection:
    """Time is the local monotonic clock; the times written in the Lease are for people."""

    def __init__(self, api: ApiServer, lease: LeaseName, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._lease = lease
        self._clock = clock
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{lease.namespace}/leases"
        self._seen: Raw | None = None
        self._seen_version = ""  # kept when `_seen` is not: an unchanged Lease goes on ageing
        self._seen_at = 0.0
        self._renewed_at: float | None = None

    @property
    def leading(self) -> bool:
        """True while nobody else can hold the Lease."""
        return self._renewed_at is not None and self._clock() < self._renewed_at + RENEW_DEADLINE

    async def acquire(self) -> None:
        """Wait until the Lease is ours."""
        while True:
            if await self._try():
                return
            await asyncio.sleep(RETRY_SECONDS * random.uniform(1.0, 1.2))  # noqa: S311

    async def hold(self) -> None:
        """Renew the Lease; returns when it is lost, at the latest when the renew deadline has passed."""
        while self.leading:
            await asyncio.sleep(min(RETRY_SECONDS, self._remaining()))
            if not await self._try() and self._holder() not in ("", self._lease.identity):
                logger.error("the lease was taken by %s", self._holder())
                return
        logger.error("the lease could not be renewed within %.0f s", RENEW_DEADLINE)

    async def release(self) -> None:
        """Let another replica take over at once."""
        if not self.leading or self._seen is None:
            return
        self._renewed_at = None
        spec = {**self._seen["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}
        try:
            await self._write({**self._seen, "spec": spec})
        except ApiError as error:
            logger.warning("the lease was not released; the next leader waits until it expires: %s", error.message)

    async def _try(self) -> bool:
        asked_at = self._clock()
        try:
            async with asyncio.timeout(min(REQUEST_SECONDS, self._remaining())):
                if self._seen is None or not self.leading:
                    await self._read()
                if not self._may_take():
                    return False
                self._see(await self._write(self._claim()))
        except ApiError as error:
            self._seen = (
                None  # 409 is somebody faster, or our own write whose answer was lost: read before the next try
            )
            logger.log(logging.DEBUG if error.status == 409 else logging.WARNING, "lease: %s", error.message)
            return False
        except TimeoutError:
            self._seen = None
            logger.warning("lease: no answer in time")
            return False
        self._renewed_at = asked_at  # and not when the answer came: the others count from the write
        return True

    def _remaining(self) -> float:
        if self._renewed_at is None or not self.leading:
            return REQUEST_SECONDS
        return self._renewed_at + RENEW_DEADLINE - self._clock()

    def _holder(self) -> str:
        return "" if self._seen is None else self._seen["spec"].get("holderIdentity") or ""

    def _may_take(self) -> bool:
        """Free, ours, or not renewed for as long as its holder promised, by our own clock."""
        if self._seen is None or self._holder() in ("", self._lease.identity):
            return True
        promised = self._seen["spec"].get("leaseDurationSeconds") or LEASE_SECONDS
        return self._clock() >= self._seen_at + float(promised)

    def _claim(self) -> Raw:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        before = {} if self._seen is None else self._seen["spec"]
        taken_over = self._holder() != self._lease.identity
        spec = {
            **before,
            "holderIdentity": self._lease.identity,
            "leaseDurationSeconds": int(LEASE_SECONDS),
            "renewTime": now,
            "acquireTime": now if taken_over else before.get("acquireTime", now),
            "leaseTransitions": before.get("leaseTransitions", 0) + (1 if before and taken_over else 0),
        }
        metadata = {"name": self._lease.name, "namespace": self._lease.namespace}
        kept = self._seen or {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}
        return {**kept, "spec": spec}

    async def _read(self) -> None:
        try:
            self._see(await self._api.call_once("GET", f"{self._collection}/{self._lease.name}"))
        except ApiError as error:
            if error.status != 404:
                raise
            self._seen = None

    async def _write(self, lease: Raw) -> Raw:
        if "resourceVersion" not in lease["metadata"]:
            return await self._api.call_once("POST", self._collection, body=lease)
        return await self._api.call_once("PUT", f"{self._collection}/{self._lease.name}", body=lease)

    def _see(self, lease: Raw) -> None:
        version = lease["metadata"]["resourceVersion"]
        if self._seen_version != version:
            self._seen_version, self._seen_at = version, self._clock()
        self._seen = lease
