"""Tests of the exits of a replica that a pause explains."""

import subprocess
import time
from pathlib import Path

import pytest

from benchmarks.soak.replicas import Replica
from testing.upgrade.releases import Release


@pytest.mark.parametrize(
    ("pause_seconds", "led_when_paused", "seconds_ago", "may_exit"),
    [
        pytest.param(12, True, 1, True, id="leader"),
        pytest.param(4, True, 1, False, id="short pause"),
        pytest.param(45, False, 1, False, id="standby"),
        pytest.param(45, True, 60, False, id="long ago"),
    ],
)
def test_only_a_recent_long_pause_of_the_leader_explains_an_exit(
    pause_seconds: float, led_when_paused: bool, seconds_ago: float, may_exit: bool
) -> None:
    with subprocess.Popen("true") as process:
        now = time.monotonic()
        replica = Replica(Release("this", Path()), 1, process, Path("log"), started_at=now)
    replica.pause_seconds, replica.led_when_paused = pause_seconds, led_when_paused
    replica.resumed_at = now - seconds_ago

    assert replica.may_exit is may_exit
