"""Tests that unexpected errors of background loops end neither the loop nor the process."""

import asyncio
import logging
from collections.abc import Iterator
from unittest.mock import patch

import pytest

from finetune_operator.metrics import Metrics
from finetune_operator.tasks import error_net
from finetune_operator.tasks.error_net import FAILURE_LIMIT_SECONDS, LOG_INTERVAL_SECONDS, RECOVERED_SECONDS, ErrorNet


async def test_a_loop_continues_after_errors_which_are_counted_and_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics, now, rounds = Metrics(), 0.0, 0
    net = ErrorNet(metrics.loop_errors, clock=lambda: now)

    async def run_round() -> None:
        nonlocal now, rounds
        rounds += 1
        now += LOG_INTERVAL_SECONDS / 4
        if rounds <= 25:
            raise KeyError("metadata")

    with caplog.at_level(logging.ERROR):
        loop = asyncio.create_task(net.repeat("sweep", run_round, lambda: 0.0))
        while rounds < 25:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert net.longest_failure_seconds() > FAILURE_LIMIT_SECONDS
        while rounds < 26:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert net.longest_failure_seconds() == 0.0
        loop.cancel()

    assert metrics.registry.get_sample_value("finetune_loop_errors_total", {"loop": "sweep"}) == 25
    assert [record.getMessage() for record in caplog.records] == ["sweep failed unexpectedly, will be retried"] * 7


async def test_a_loop_ends_if_it_is_cancelled() -> None:
    async def wait() -> None:
        await asyncio.sleep(60)

    delays: Iterator[float] = iter((0.0,))
    loop = asyncio.create_task(ErrorNet().repeat("sweep", wait, lambda: next(delays)))
    await asyncio.sleep(0)
    loop.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loop


async def test_a_loop_that_ends_again_and_again_has_failed_until_it_runs_for_a_minute() -> None:
    now, runs = 0.0, 0
    net = ErrorNet(clock=lambda: now)

    async def run() -> None:
        nonlocal now, runs
        runs += 1
        now += RECOVERED_SECONDS / 2
        if runs <= 12:
            raise KeyError("metadata")

    with patch.object(error_net, "RESTART_SECONDS", 1e-9):
        await net.keep_running("watch", run)

    assert runs == 13
    assert net.longest_failure_seconds() > FAILURE_LIMIT_SECONDS
    now += RECOVERED_SECONDS / 2
    assert net.longest_failure_seconds() == 0.0


async def test_an_exception_by_design_ends_a_loop() -> None:
    net = ErrorNet(by_design=(LookupError,))

    async def run() -> None:
        raise KeyError("metadata")

    with pytest.raises(KeyError):
        await net.keep_running("watch", run)
    with pytest.raises(KeyError):
        await net.repeat("sweep", run, lambda: 0.0)
