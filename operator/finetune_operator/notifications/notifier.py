"""Queues the events of all jobs and delivers them, without ever delaying a reconcile pass."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from zlib import crc32

from prometheus_client import Counter

from finetune_api.v1alpha1.job import ObjectMeta
from finetune_api.v1alpha1.status import JobStatus
from finetune_operator.core.transitions import list_transitions
from finetune_operator.notifications.cloud_event import build_cloud_event, build_event_id
from finetune_operator.notifications.sink import HttpSink, SendResult, SinkConfig

# A transition is reported for this time: by a new leader, which has no memory, and in retries.
DELIVERY_WINDOW = timedelta(minutes=15)
LANES = 4  # events of one job are in one lane, and thus in order
MAX_QUEUED_PER_LANE = 500
FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0
EXPIRED, DROPPED = "expired", "dropped"  # values of the label `result`, besides those of SendResult

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class QueuedEvent:
    """An event that is waiting for its delivery."""

    event_id: str
    body: bytes
    time: datetime  # of the transition


class Notifier:
    """Reports each transition of a job once per process; a sink recognises repetitions after a restart by their id."""

    def __init__(
        self,
        config: SinkConfig,
        results: Counter,
        *,
        now: Callable[[], datetime],
        first_retry_seconds: float = FIRST_RETRY_SECONDS,
    ) -> None:
        """Create a notifier. results: counter with the label `result`."""
        self._config = config
        self._results = results
        self._now = now
        self._first_retry_seconds = first_retry_seconds
        self._lanes = tuple(asyncio.Queue[QueuedEvent](MAX_QUEUED_PER_LANE) for _ in range(LANES))
        self._reported: dict[str, datetime] = {}  # time of the transition by event id, oldest first
        self._is_available = True

    @property
    def queued_count(self) -> int:
        """The number of events that are not delivered yet."""
        return sum(lane.qsize() for lane in self._lanes)

    def report(self, job: ObjectMeta, status: JobStatus) -> None:
        """Queue the recent transitions of a job that this process has not reported; never blocks.

        Called in every pass after the status is written, so that a transition is also reported if the pass that
        wrote it failed afterwards. If the queue is full, the next pass of the job tries again.
        """
        oldest = self._now() - DELIVERY_WINDOW
        self._forget(oldest)
        lane = self._lanes[crc32(job.uid.encode()) % LANES]
        for transition in list_transitions(status):
            event_id = build_event_id(job, transition)
            if transition.time < oldest or event_id in self._reported:
                continue
            body = build_cloud_event(job, transition, source=self._config.source)
            try:
                lane.put_nowait(QueuedEvent(event_id, body, transition.time))
            except asyncio.QueueFull:
                self._count(DROPPED)
                continue
            self._reported[event_id] = transition.time

    async def run(self) -> None:
        """Deliver the queued events until cancelled; what is left then is reported by the next leader."""
        async with HttpSink(self._config, now=self._now) as sink, asyncio.TaskGroup() as group:
            for lane in self._lanes:
                group.create_task(self._deliver_lane(lane, sink))

    async def _deliver_lane(self, lane: asyncio.Queue[QueuedEvent], sink: HttpSink) -> None:
        while True:
            event = await lane.get()
            self._count(await self._deliver(event, sink))

    async def _deliver(self, event: QueuedEvent, sink: HttpSink) -> str:
        """Send the event until the sink accepts or rejects it or it is too old; return the label of the result."""
        delay = self._first_retry_seconds
        while True:
            if event.time < self._now() - DELIVERY_WINDOW:
                return EXPIRED
            result, problem = await sink.send(event.event_id, event.body)
            self._log_availability(result, problem)
            if result is not SendResult.UNAVAILABLE:
                return result.value
            await asyncio.sleep(delay)
            delay = min(2 * delay, MAX_RETRY_SECONDS)

    def _log_availability(self, result: SendResult, problem: str) -> None:
        """Log a rejected event, and the first failure of the sink after a success."""
        if result is SendResult.REJECTED:
            logger.warning("the notification sink rejected an event: %s", problem)
        elif result is SendResult.UNAVAILABLE and self._is_available:
            logger.warning("the notification sink is unavailable, events are repeated for 15 minutes: %s", problem)
        self._is_available = result is not SendResult.UNAVAILABLE

    def _forget(self, oldest: datetime) -> None:
        """Forget transitions that are too old to be reported again. The dictionary is nearly ordered by time."""
        while self._reported and self._reported[first := next(iter(self._reported))] < oldest:
            del self._reported[first]

    def _count(self, result: str) -> None:
        self._results.labels(result).inc()
