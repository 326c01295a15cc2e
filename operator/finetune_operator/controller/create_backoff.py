"""Delays the creates of jobs whose last create the API server rejected, for example because of a full quota.

See decisions/139.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from finetune_operator.controller.child_cache import JobKey
from finetune_operator.observation.pods import RejectedCreate

MIN_DELAY_SECONDS, MAX_DELAY_SECONDS = 1.0, 60.0
MAX_UNCHANGED_DELAY_SECONDS = 300.0  # while the API server gives the same reason
UNCHANGED_AFTER = 10  # equal rejections
# Tries of all jobs after their first one: two per second, averaged over a minute.
SECONDS_PER_TRY, MAX_TRIES_AT_ONCE = 0.5, 20


@dataclass(frozen=True)
class _Rejection:
    rejected: RejectedCreate
    count: int  # consecutive tries with equal messages
    delay: float
    next_try: float


class CreateBackoff:
    """Times at which jobs may try again to create their objects. Every try of a job is a probe with one pod.

    A change in a namespace, such as the end of a pod, permits its jobs to try again at once. The number
    of tries of all jobs is limited, so that many waiting jobs cause few rejected requests.
    """

    def __init__(self, *, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or time.monotonic  # no default argument, because the simulator replaces the function
        self._rejections: dict[JobKey, _Rejection] = {}
        self._bucket_full_at = float("-inf")  # of a token bucket of tries

    def record(self, key: JobKey, rejected_creates: Sequence[RejectedCreate]) -> None:
        """Record the result of a pass that tried to create objects; an empty result resets the delay."""
        if not rejected_creates:
            self.forget(key)
            return
        rejected, last = rejected_creates[0], self._rejections.get(key)
        count = last.count + 1 if last and last.rejected.message == rejected.message else 1
        limit = MAX_UNCHANGED_DELAY_SECONDS if count > UNCHANGED_AFTER else MAX_DELAY_SECONDS
        delay = min(limit, 2 * last.delay if last else MIN_DELAY_SECONDS)
        jitter = random.uniform(0.5, 1.0)  # noqa: S311  two gangs that wait for one quota must not try together
        now = self._clock()
        self._rejections[key] = _Rejection(rejected, count, delay, now + delay * jitter)
        if last is not None:
            self._bucket_full_at = max(now, self._bucket_full_at) + SECONDS_PER_TRY

    def remaining_seconds(self, key: JobKey) -> float:
        """Return the time until the job may try again; zero if its last try was not rejected."""
        rejection, now = self._rejections.get(key), self._clock()
        if rejection is None:
            return 0.0
        if now < rejection.next_try:
            return rejection.next_try - now
        if self._bucket_full_at - now < MAX_TRIES_AT_ONCE * SECONDS_PER_TRY:
            return 0.0
        return random.uniform(1.0, 1.0 + SECONDS_PER_TRY * len(self._rejections))  # noqa: S311

    def get_last_rejection(self, key: JobKey) -> RejectedCreate | None:
        """Return the rejected create because of which the next try of the job begins with a probe; None without one.

        It is the last one of the job, except every tenth time, because its quota may have grown. If the last create of
        the job was accepted, it is that of another job of the namespace, without the message, which contains the size
        of other pods.
        """
        if rejection := self._rejections.get(key):
            return None if rejection.count % UNCHANGED_AFTER == 0 else rejection.rejected
        others = (each.rejected for other, each in self._rejections.items() if other.namespace == key.namespace)
        return next((replace(rejected, message="") for rejected in others), None)

    def wake(self, namespace: str) -> list[JobKey]:
        """Permit the waiting jobs of a namespace to try again, and return them."""
        keys = [key for key in self._rejections if key.namespace == namespace]
        for key in keys:
            last = self._rejections[key]
            self._rejections[key] = replace(last, count=1, delay=MIN_DELAY_SECONDS, next_try=self._clock())
        return keys

    def forget(self, key: JobKey) -> None:
        """Drop the state of a job that has its objects, has finished or was deleted."""
        self._rejections.pop(key, None)
