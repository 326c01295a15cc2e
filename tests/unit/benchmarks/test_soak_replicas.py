"""Tests of pausing a replica of the soak test and of the exits that a pause explains."""

import dataclasses
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.soak.replicas import Replica
from testing.upgrade.releases import Release


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[Replica]:
    process = subprocess.Popen(("sleep", "60"))
    yield Replica(Release("this", tmp_path), 1, process, tmp_path / "log", started_at=time.monotonic(), is_leader=True)
    process.kill()
    process.wait()


def read_process_state(replica: Replica) -> str:
    return Path(f"/proc/{replica.process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_for_process_state(replica: Replica, *, is_stopped: bool) -> None:
    deadline = time.monotonic() + 10
    while (read_process_state(replica) == "T") != is_stopped:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_pause_stops_the_process_until_it_is_resumed(replica: Replica) -> None:
    replica.pause()
    wait_for_process_state(replica, is_stopped=True)
    replica.resume()
    wait_for_process_state(replica, is_stopped=False)

    assert not replica.may_exit  # the pause was short


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
    replica: Replica, pause_seconds: float, led_when_paused: bool, seconds_ago: float, may_exit: bool
) -> None:
    paused = dataclasses.replace(
        replica,
        pause_seconds=pause_seconds,
        led_when_paused=led_when_paused,
        resumed_at=time.monotonic() - seconds_ago,
    )

    assert paused.may_exit is may_exit
