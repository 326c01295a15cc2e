"""Leader election: only the replica that holds the Lease acts, while standbys keep their caches up to date."""

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from finetune_operator.kube.api_client import ApiClient, ApiError
from finetune_operator.kube.api_paths import collection_path, object_path
from finetune_operator.observation.ownership import RawBody

logger = logging.getLogger(__name__)

LEASE_DURATION_SECONDS = 15.0
RENEW_DEADLINE_SECONDS = 10.0  # shorter than the lease duration, to tolerate clock drift between replicas
RETRY_PERIOD_SECONDS = 2.0
REQUEST_TIMEOUT_SECONDS = 4.0


@dataclass(frozen=True)
class LeaseConfig:
    """Namespace and name of the Lease, and the holder identity of this replica."""

    namespace: str
    name: str
    identity: str


class LeaderElection:
    """Acquires and renews the Lease. Expiry is measured by the local monotonic clock, not by the times in the Lease."""

    def __init__(self, api: ApiClient, lease: LeaseConfig, *, clock: Callable[[], float] | None = None) -> None:
        self._api = api
        self._lease = lease
        self._clock = clock or time.monotonic  # no default argument, because the simulator replaces the function
        self._collection = collection_path("Lease", lease.namespace)
        self._path = object_path("Lease", lease.namespace, lease.name)
        self._observed: RawBody | None = None
        # resourceVersion; kept when `_observed` is reset, so that an unchanged Lease still expires
        self._observed_version = ""
        self._observed_at = 0.0
        self._renewed_at: float | None = None

    @property
    def is_leading(self) -> bool:
        """Whether this replica holds the Lease, so that no other replica can hold it."""
        return self._renewed_at is not None and self._clock() < self._renewed_at + RENEW_DEADLINE_SECONDS

    async def acquire(self) -> None:
        """Wait until this replica holds the Lease."""
        while True:
            if await self._try_acquire_or_renew():
                return
            await asyncio.sleep(RETRY_PERIOD_SECONDS * random.uniform(1.0, 1.2))  # noqa: S311

    async def renew_until_lost(self) -> None:
        """Renew the Lease until it is lost or the renew deadline has passed.

        A Lease that expired during a pause of the process counts as lost even if no other replica has acquired it,
        because workers that read `is_leading` in the meantime have stopped.
        """
        while self.is_leading:
            await asyncio.sleep(min(RETRY_PERIOD_SECONDS, self._compute_remaining_seconds()))
            if not self.is_leading:
                break
            if not await self._try_acquire_or_renew() and self._get_holder() not in ("", self._lease.identity):
                logger.error("the lease was taken by %s", self._get_holder())
                return
        logger.error("the lease could not be renewed within %.0f s", RENEW_DEADLINE_SECONDS)

    async def release(self) -> None:
        """Release the Lease, so that another replica can acquire it immediately.

        A renewal that was cancelled, or is in flight, may have taken effect, so that the first write is a conflict.
        """
        if not self.is_leading or self._observed is None:
            return
        try:
            try:
                await self._write_release(self._observed)
            except ApiError as error:
                if error.status != 409:
                    raise
                await self._read_lease()
                if self._observed is not None and self._get_holder() == self._lease.identity:
                    await self._write_release(self._observed)
        except ApiError as error:
            logger.warning("the lease was not released; the next leader waits until it expires: %s", error.message)

    async def _write_release(self, lease: RawBody) -> None:
        self._renewed_at = None
        await self._write_lease({**lease, "spec": {**lease["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}})

    async def _try_acquire_or_renew(self) -> bool:
        requested_at, was_leading = self._clock(), self.is_leading
        try:
            async with asyncio.timeout(min(REQUEST_TIMEOUT_SECONDS, self._compute_remaining_seconds())):
                if self._observed is None or not self.is_leading:
                    await self._read_lease()
                if not self._can_acquire():
                    return False
                self._observe_lease(await self._write_lease(self._build_lease()))
        except ApiError as error:
            # After a conflict (409) or a lost response, the Lease is read again before the next request.
            self._observed = None
            logger.log(logging.DEBUG if error.status == 409 else logging.WARNING, "lease: %s", error.message)
            return False
        except TimeoutError:
            self._observed = None
            logger.warning("lease: no answer in time")
            return False
        if was_leading and not self.is_leading:  # the lease expired before the response arrived
            return False
        self._renewed_at = requested_at  # the request time, because standbys measure the lease duration from the write
        return True

    def _compute_remaining_seconds(self) -> float:
        if self._renewed_at is None or not self.is_leading:
            return REQUEST_TIMEOUT_SECONDS
        return self._renewed_at + RENEW_DEADLINE_SECONDS - self._clock()

    def _get_holder(self) -> str:
        return "" if self._observed is None else self._observed["spec"].get("holderIdentity") or ""

    def _can_acquire(self) -> bool:
        """Return whether the Lease is free, held by this replica, or expired according to the local clock."""
        if self._observed is None or self._get_holder() in ("", self._lease.identity):
            return True
        duration = self._observed["spec"].get("leaseDurationSeconds") or LEASE_DURATION_SECONDS
        return self._clock() >= self._observed_at + float(duration)

    def _build_lease(self) -> RawBody:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        old_spec = {} if self._observed is None else self._observed["spec"]
        is_new_holder = self._get_holder() != self._lease.identity
        spec = {
            **old_spec,
            "holderIdentity": self._lease.identity,
            "leaseDurationSeconds": int(LEASE_DURATION_SECONDS),
            "renewTime": now,
            "acquireTime": now if is_new_holder else old_spec.get("acquireTime", now),
            "leaseTransitions": old_spec.get("leaseTransitions", 0) + (1 if old_spec and is_new_holder else 0),
        }
        metadata = {"name": self._lease.name, "namespace": self._lease.namespace}
        base_lease = self._observed or {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}
        return {**base_lease, "spec": spec}

    async def _read_lease(self) -> None:
        try:
            self._observe_lease(await self._api.call_once("GET", self._path))
        except ApiError as error:
            if error.status != 404:
                raise
            self._observed = None

    async def _write_lease(self, lease: RawBody) -> RawBody:
        if "resourceVersion" not in lease["metadata"]:
            return await self._api.call_once("POST", self._collection, body=lease)
        return await self._api.call_once("PUT", self._path, body=lease)

    def _observe_lease(self, lease: RawBody) -> None:
        version = lease["metadata"]["resourceVersion"]
        if self._observed_version != version:
            self._observed_version, self._observed_at = version, self._clock()
        self._observed = lease
