"""Queues the events of all jobs and delivers them, without ever delaying a reconcile pass."""

import asyncio
import logging
from collections import Counter as Count
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from prometheus_client import Counter

from finetune_api.v1alpha1.job import ObjectMeta
from finetune_api.v1alpha1.status import JobStatus
from finetune_operator.core.transitions import list_transitions
from finetune_operator.notifications.cloud_event import build_cloud_event, build_event_id
from finetune_operator.notifications.sink import HttpSink, SendResult, SinkConfig
from finetune_operator.tasks.error_net import ErrorNet
from finetune_operator.tasks.workqueue import WorkQueue

# A transition is reported for this time: by a new leader, which has no memory, and in retries.
DELIVERY_WINDOW = timedelta(minutes=15)
SENDERS = 4  # concurrent requests, of which one namespace uses all but one
MAX_QUEUED, MAX_QUEUED_PER_NAMESPACE = 2000, 500
FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0
MAX_REFUSALS = 5  # of one event while the sink accepts others
EXPIRED, DROPPED = "expired", "dropped"  # values of the label `result`, besides those of SendResult

Key = tuple[str, str]  # namespace and uid of a job

logger = logging.getLogger(__name__)


@dataclass
class QueuedEvent:
    """An event that is waiting for its delivery."""

    event_id: str
    body: bytes
    time: datetime  # of the transition
    tries: int = 0
    delivered_before: int = 0  # events that the sink had accepted before the first try


class Notifier:
    """Reports each transition of a job once per process; a sink recognises repetitions after a restart by their id.

    The events of one job are sent in order. The retries of one job delay no other, and namespaces take turns.
    """

    def __init__(
        self,
        config: SinkConfig,
        results: Counter,
        *,
        now: Callable[[], datetime],
        first_retry_seconds: float = FIRST_RETRY_SECONDS,
        net: ErrorNet | None = None,
    ) -> None:
        """Create a notifier. results: counter with the label `result`."""
        self._config = config
        self._results = results
        self._now = now
        self._first_retry_seconds = first_retry_seconds
        self._net = net or ErrorNet()
        self._events: dict[Key, deque[QueuedEvent]] = {}
        self._queued: Count[str] = Count()  # events by namespace
        self._queue: WorkQueue[Key] = WorkQueue(get_group=lambda key: key[0], max_per_group=SENDERS - 1)
        self._reported: dict[str, datetime] = {}  # time of the transition by event id, oldest first
        self._delivered = 0
        self._is_available = True

    @property
    def queued_count(self) -> int:
        """The number of events that are not delivered yet."""
        return self._queued.total()

    def report(self, job: ObjectMeta, status: JobStatus) -> None:
        """Queue the recent transitions of a job that this process has not reported; never blocks.

        Called in every pass after the status is written, so that a transition is also reported if the pass that
        wrote it failed afterwards. If the queue is full, the next pass of the job tries again.
        """
        oldest = self._now() - DELIVERY_WINDOW
        self._forget(oldest)
        key = job.namespace, job.uid
        for transition in list_transitions(status):
            event_id = build_event_id(job, transition)
            if transition.time < oldest or event_id in self._reported:
                continue
            if self.queued_count >= MAX_QUEUED or self._queued[key[0]] >= MAX_QUEUED_PER_NAMESPACE:
                self._count(DROPPED)
                continue
            body = build_cloud_event(job, transition, source=self._config.source)
            self._events.setdefault(key, deque()).append(QueuedEvent(event_id, body, transition.time))
            self._queued[key[0]] += 1
            self._reported[event_id] = transition.time
            if len(self._events[key]) == 1:
                self._queue.add(key)

    async def run(self) -> None:
        """Deliver the queued events until cancelled; what is left then is reported by the next leader."""
        async with HttpSink(self._config, now=self._now) as sink, asyncio.TaskGroup() as group:
            for _ in range(SENDERS):
                group.create_task(self._send_events(sink))

    async def _send_events(self, sink: HttpSink) -> None:
        while True:
            async with self._queue.next() as key:
                try:
                    await self._send_first(key, sink)
                except Exception as error:  # an unforeseen event must not end the others
                    self._net.record("notifications", error, about=f"{key[0]}/{key[1]}")
                    self._queue.retry(key, min_delay_seconds=MAX_RETRY_SECONDS)

    async def _send_first(self, key: Key, sink: HttpSink) -> None:
        """Send the first event of a job once; drop it unless it is to be repeated later."""
        event = self._events[key][0]
        result = await self._deliver(event, sink)
        if result is None:
            delay = min(MAX_RETRY_SECONDS, self._first_retry_seconds * 2.0 ** (event.tries - 1))
            self._queue.add_after(key, delay)
            return
        self._count(result)
        self._events[key].popleft()
        self._queued[key[0]] -= 1
        if self._events[key]:
            self._queue.add(key)
        else:
            del self._events[key]
            self._queue.remove(key)

    async def _deliver(self, event: QueuedEvent, sink: HttpSink) -> str | None:
        """Send the event once and return the label of its result; None if it is to be repeated."""
        if event.time < self._now() - DELIVERY_WINDOW:
            return EXPIRED
        if event.tries == 0:
            event.delivered_before = self._delivered
        event.tries += 1
        result, problem = await sink.send(event.event_id, event.body)
        accepts_others = self._delivered > event.delivered_before
        if result is SendResult.REFUSED and event.tries >= MAX_REFUSALS and accepts_others:
            result = SendResult.REJECTED
        self._log_availability(result, problem)
        if result in (SendResult.UNAVAILABLE, SendResult.REFUSED):
            return None
        self._delivered += result is SendResult.DELIVERED
        return result.value

    def _log_availability(self, result: SendResult, problem: str) -> None:
        """Log a rejected event, and the first failure of the sink after a success."""
        is_available = result in (SendResult.DELIVERED, SendResult.REJECTED)
        if result is SendResult.REJECTED:
            logger.warning("the notification sink rejected an event: %s", problem)
        elif not is_available and self._is_available:
            logger.warning("the notification sink is unavailable, events are repeated for 15 minutes: %s", problem)
        self._is_available = is_available

    def _forget(self, oldest: datetime) -> None:
        """Forget transitions that are too old to be reported again. The dictionary is nearly ordered by time."""
        while self._reported and self._reported[first := next(iter(self._reported))] < oldest:
            del self._reported[first]

    def _count(self, result: str) -> None:
        self._results.labels(result).inc()
