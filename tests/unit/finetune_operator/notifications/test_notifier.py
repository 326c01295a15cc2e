"""Tests of notifications against a local HTTP server: content, authentication, retries, order and limits."""

import asyncio
import base64
import hashlib
import hmac
import logging
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from yarl import URL

from finetune_api.v1alpha1.job import ObjectMeta
from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, JobStatus
from finetune_operator.metrics import Metrics
from finetune_operator.notifications.notifier import (
    DELIVERY_WINDOW,
    MAX_QUEUED,
    MAX_QUEUED_PER_NAMESPACE,
    MAX_REFUSALS,
    Notifier,
)
from finetune_operator.notifications.sink import (
    PERMANENT_STATUSES,
    HttpSink,
    InvalidSink,
    SendResult,
    SinkConfig,
    parse_sink_url,
)
from testing.builders.jobs import NOW
from testing.fakes.notification_sink import FakeSink, serve_sink
from testing.processes.waiting import wait_in_event_loop

NOTIFICATIONS_PAGE = Path(__file__).parents[4] / "docs/operations/notifications.md"
SECRET = "s3cr3t-token"  # noqa: S105


@dataclass
class MovableClock:
    now: datetime = NOW

    def read(self) -> datetime:
        return self.now


def metadata(name: str = "bert", uid: str = "1111", namespace: str = "default") -> ObjectMeta:
    return ObjectMeta.model_validate({"name": name, "namespace": namespace, "uid": uid, "generation": 1})


def started(*, attempt: int = 0, time: datetime = NOW) -> JobStatus:
    return JobStatus(attempts=(AttemptRecord(attempt=attempt, state=AttemptState.STARTING, start_time=time),))


def failed(message: str = "rank 3 was ended by SIGKILL") -> JobStatus:
    record = AttemptRecord(
        attempt=2,
        state=AttemptState.FAILED,
        end_time=NOW,
        reason="RankKilled",
        fault="transient",
        message=message,
        node_rank=1,
        rank=3,
    )
    return JobStatus(attempts=(record,), completion_time=NOW)


def build_notifier(
    url: str, metrics: Metrics, *, clock: MovableClock | None = None, secrets: Path | None = None
) -> Notifier:
    config = SinkConfig(URL(url), "https://cluster.example", secrets)
    read_now = (clock or MovableClock()).read
    return Notifier(config, metrics.notifications, now=read_now, first_retry_seconds=0.01)


def count_results(metrics: Metrics, result: str) -> float:
    return metrics.registry.get_sample_value("finetune_notifications_total", {"result": result}) or 0.0


@asynccontextmanager
async def running(notifier: Notifier) -> AsyncIterator[None]:
    task = asyncio.create_task(notifier.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait((task,))


@pytest.fixture
async def sink() -> AsyncIterator[FakeSink]:
    async with serve_sink() as sink:
        yield sink


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


async def test_a_transition_is_sent_as_a_cloud_event_in_structured_mode(sink: FakeSink, metrics: Metrics) -> None:
    notifier = build_notifier(sink.url, metrics)

    notifier.report(metadata(), failed())
    async with running(notifier):
        await wait_in_event_loop(lambda: len(sink.received) == 1)

    (request,) = sink.received
    assert request.headers["Content-Type"] == "application/cloudevents+json; charset=utf-8"
    assert request.event == {
        "specversion": "1.0",
        "id": "1111/failed-2",
        "source": "https://cluster.example",
        "subject": "/apis/finetune.dev/v1alpha1/namespaces/default/finetunejobs/bert",
        "type": "dev.finetune.job.failed",
        "time": "2026-01-01T12:00:00Z",
        "datacontenttype": "application/json",
        "data": {
            "namespace": "default",
            "name": "bert",
            "uid": "1111",
            "attempt": 2,
            "reason": "RankKilled",
            "fault": "transient",
            "message": "rank 3 was ended by SIGKILL",
            "nodeRank": 1,
            "rank": 3,
        },
    }
    assert "Authorization" not in request.headers


async def test_a_transition_is_sent_once_however_many_passes_report_it(sink: FakeSink, metrics: Metrics) -> None:
    notifier = build_notifier(sink.url, metrics)
    async with running(notifier):
        for _ in range(5):
            notifier.report(metadata(), started())
        await wait_in_event_loop(lambda: count_results(metrics, "delivered") == 1)

    assert len(sink.received) == 1


async def test_a_new_process_repeats_recent_transitions_with_the_same_id_and_content(
    sink: FakeSink, metrics: Metrics
) -> None:
    clock = MovableClock()
    for count in (1, 2):
        clock.now += timedelta(minutes=1)
        notifier = build_notifier(sink.url, metrics, clock=clock)
        notifier.report(metadata(), started())
        async with running(notifier):
            await wait_in_event_loop(lambda: len(sink.received) == count)  # noqa: B023

    first, second = sink.received
    assert first.body == second.body


async def test_a_new_process_does_not_repeat_old_transitions(sink: FakeSink, metrics: Metrics) -> None:
    clock = MovableClock(NOW + DELIVERY_WINDOW + timedelta(seconds=1))
    notifier = build_notifier(sink.url, metrics, clock=clock)

    notifier.report(metadata(), started())

    assert notifier.queued_count == 0


async def test_the_memory_of_reported_transitions_is_bounded_by_the_window(metrics: Metrics) -> None:
    clock = MovableClock()
    notifier = build_notifier("http://127.0.0.1:9/", metrics, clock=clock)
    for minute in range(100):
        clock.now = NOW + timedelta(minutes=minute)
        notifier.report(metadata(uid=f"uid-{minute}"), started(time=clock.now))

    assert len(notifier._reported) == DELIVERY_WINDOW // timedelta(minutes=1) + 1


@pytest.mark.parametrize("status", [500, 503, 429, 401, 403, 404, 302])
async def test_an_event_is_repeated_until_the_sink_accepts_it(sink: FakeSink, metrics: Metrics, status: int) -> None:
    sink.statuses = [status, status]
    notifier = build_notifier(sink.url, metrics)

    notifier.report(metadata(), started())
    async with running(notifier):
        await wait_in_event_loop(lambda: count_results(metrics, "delivered") == 1)

    assert len({request.body for request in sink.received}) == 1
    assert sink.paths == ["/events"] * 3, "redirects are not followed"


@pytest.mark.parametrize("status", sorted(PERMANENT_STATUSES))
async def test_a_rejected_event_is_not_repeated(sink: FakeSink, metrics: Metrics, status: int) -> None:
    sink.statuses = [status]
    notifier = build_notifier(sink.url, metrics)

    notifier.report(metadata(), started())
    notifier.report(metadata(name="next"), failed())
    async with running(notifier):
        await wait_in_event_loop(lambda: count_results(metrics, "delivered") == 1)

    assert count_results(metrics, "rejected") == 1
    assert [request.kind for request in sink.received] == ["started", "failed"]


async def test_an_event_expires_if_the_sink_stays_unavailable(sink: FakeSink, metrics: Metrics) -> None:
    clock = MovableClock()
    sink.statuses = [503] * 1000
    notifier = build_notifier(sink.url, metrics, clock=clock)

    notifier.report(metadata(), started())
    async with running(notifier):
        await wait_in_event_loop(lambda: len(sink.received) == 2)
        clock.now += DELIVERY_WINDOW + timedelta(seconds=1)
        await wait_in_event_loop(lambda: count_results(metrics, "expired") == 1)

    assert notifier.queued_count == 0


async def test_events_of_a_job_arrive_in_order_while_a_request_fails(sink: FakeSink, metrics: Metrics) -> None:
    sink.statuses = [503]
    records = (
        AttemptRecord(attempt=0, state=AttemptState.STOPPED, start_time=NOW, running_time=NOW, end_time=NOW),
        AttemptRecord(attempt=1, state=AttemptState.STARTING, start_time=NOW),
    )
    notifier = build_notifier(sink.url, metrics)

    notifier.report(metadata(), JobStatus(attempts=records))
    async with running(notifier):
        await wait_in_event_loop(lambda: count_results(metrics, "delivered") == 4)

    assert [request.kind for request in sink.received] == ["started", "started", "running", "suspended", "resumed"]


async def test_a_sink_that_does_not_respond_neither_blocks_reports_nor_grows_the_queue(
    sink: FakeSink, metrics: Metrics
) -> None:
    sink.responds.clear()
    notifier = build_notifier(sink.url, metrics)
    async with running(notifier):
        notifier.report(metadata(), started())
        await wait_in_event_loop(lambda: len(sink.received) == 1)
        for namespace in range(6):
            for number in range(MAX_QUEUED_PER_NAMESPACE + 1):  # report is no coroutine, so it cannot wait
                notifier.report(metadata(uid=f"{namespace}-{number}", namespace=f"team-{namespace}"), started())
            assert notifier._queued[f"team-{namespace}"] <= MAX_QUEUED_PER_NAMESPACE

        assert notifier.queued_count == MAX_QUEUED
        assert count_results(metrics, "dropped") == 6 * (MAX_QUEUED_PER_NAMESPACE + 1) + 1 - MAX_QUEUED


async def test_events_that_the_sink_refuses_neither_delay_those_of_other_tenants_nor_remain_for_ever(
    sink: FakeSink, metrics: Metrics
) -> None:
    sink.refuses = lambda event: event["data"]["namespace"] == "refused"
    notifier = build_notifier(sink.url, metrics)
    for number in range(20):
        notifier.report(metadata(uid=f"refused-{number}", namespace="refused"), started())
    async with running(notifier):
        await wait_in_event_loop(lambda: len(sink.received) >= 20)
        for number in range(20):
            notifier.report(metadata(uid=f"uid-{number}", namespace="team"), started())
        await wait_in_event_loop(lambda: count_results(metrics, "delivered") == 20)
        await wait_in_event_loop(lambda: count_results(metrics, "rejected") == 20)

    tries = Counter(request.event["id"] for request in sink.received if sink.refuses(request.event))
    assert min(tries.values()) >= MAX_REFUSALS


async def test_a_transition_that_did_not_fit_into_the_queue_is_reported_by_a_later_pass(
    sink: FakeSink, metrics: Metrics
) -> None:
    notifier = build_notifier(sink.url, metrics)
    for number in range(MAX_QUEUED_PER_NAMESPACE):
        notifier.report(metadata(uid=f"uid-{number}"), started())
    notifier.report(metadata(), failed())
    assert count_results(metrics, "dropped") == 1

    async with running(notifier):
        await wait_in_event_loop(lambda: notifier.queued_count == 0)
        notifier.report(metadata(), failed())
        await wait_in_event_loop(lambda: sink.received[-1].kind == "failed")


async def test_an_unreachable_sink_is_logged_once_without_url_and_secrets(
    tmp_path: Path, metrics: Metrics, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "token").write_text(SECRET)
    notifier = build_notifier("http://127.0.0.1:9/events?key=secret-in-query", metrics, secrets=tmp_path)

    with caplog.at_level(logging.DEBUG, logger="finetune_operator"):
        notifier.report(metadata(), started())
        async with running(notifier):
            await wait_in_event_loop(lambda: caplog.records)
            await asyncio.sleep(0.3)

    assert [record.getMessage() for record in caplog.records] == [
        "the notification sink is unavailable, events are repeated for 15 minutes: ClientConnectorError"
    ]


async def send_once(sink: FakeSink, secrets: Path | None) -> tuple[SendResult, str]:
    async with HttpSink(SinkConfig(URL(sink.url), secrets=secrets), now=lambda: NOW) as http_sink:
        return await http_sink.send("1111/started-0", b'{"a": 1}')


async def test_the_token_is_read_again_for_each_request(sink: FakeSink, tmp_path: Path) -> None:
    for token in ("first", "second"):
        (tmp_path / "token").write_text(f"{token}\n")
        assert await send_once(sink, tmp_path) == (SendResult.DELIVERED, "")

    assert [request.headers["Authorization"] for request in sink.received] == ["Bearer first", "Bearer second"]


async def test_the_url_may_come_from_the_secret(sink: FakeSink, tmp_path: Path) -> None:
    (tmp_path / "url").write_text(f"{sink.url}\n")
    async with HttpSink(SinkConfig(None, secrets=tmp_path), now=lambda: NOW) as http_sink:
        assert await http_sink.send("1111/started-0", b"{}") == (SendResult.DELIVERED, "")
        (tmp_path / "url").write_text("ftp://user@example.org")
        assert await http_sink.send("1111/started-0", b"{}") == (
            SendResult.UNAVAILABLE,
            "the URL must begin with http:// or https:// and contain a host",
        )


async def test_the_signature_covers_id_time_and_body(sink: FakeSink, tmp_path: Path) -> None:
    (tmp_path / "signing-key").write_bytes(b"key")

    await send_once(sink, tmp_path)

    (request,) = sink.received
    timestamp = request.headers["webhook-timestamp"]
    signed = b"1111/started-0." + timestamp.encode() + b"." + request.body
    expected = base64.b64encode(hmac.new(b"key", signed, hashlib.sha256).digest()).decode()
    assert request.headers["webhook-signature"] == f"v1,{expected}"
    assert (request.headers["webhook-id"], timestamp) == ("1111/started-0", str(int(NOW.timestamp())))
    assert "Authorization" not in request.headers


@pytest.mark.parametrize(("key", "is_accepted"), [(b"key", True), (b"other", False)])
async def test_the_documented_check_accepts_the_signature(
    sink: FakeSink, tmp_path: Path, key: bytes, is_accepted: bool
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", NOTIFICATIONS_PAGE.read_text(), re.DOTALL)
    variables: dict[str, Any] = {}
    exec(code, variables)  # noqa: S102
    (tmp_path / "signing-key").write_bytes(b"key")

    await send_once(sink, tmp_path)

    (request,) = sink.received
    assert variables["is_authentic"](request.headers, request.body, key) is is_accepted


@pytest.mark.parametrize("token", [b"a\nb", b"a\x00b", "ä".encode()], ids=["line break", "zero byte", "not ASCII"])
async def test_an_invalid_token_is_reported_without_its_value(sink: FakeSink, tmp_path: Path, token: bytes) -> None:
    (tmp_path / "token").write_bytes(token)

    result, problem = await send_once(sink, tmp_path)

    assert result is SendResult.UNAVAILABLE
    assert problem == "the file token contains characters that a header cannot contain"
    assert sink.received == []


async def test_a_message_is_truncated_and_has_no_invalid_characters(sink: FakeSink, metrics: Metrics) -> None:
    notifier = build_notifier(sink.url, metrics)

    notifier.report(metadata(), failed("ä" * 100_000 + "\udc80"))
    async with running(notifier):
        await wait_in_event_loop(lambda: len(sink.received) == 1)

    assert len(sink.received[0].body) < 3000
    assert sink.received[0].event["data"]["message"].startswith("ää")


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("ftp://example.org", "must begin with http"),
        ("example.org/events", "must begin with http"),
        ("https://", "contain a host"),
        ("https://user:password@example.org", "neither user name"),
        ("https://example.org/#fragment", "neither user name"),
        ("https://example.org:port", "cannot be parsed"),
    ],
)
def test_an_unusable_url_is_explained_without_the_url(url: str, problem: str) -> None:
    with pytest.raises(InvalidSink, match=problem) as raised:
        parse_sink_url(url)

    assert "password" not in str(raised.value).replace("user name, password nor", "")
