"""Tests of the delay after rejected creates."""

import pytest

from finetune_operator.controller.child_cache import JobKey
from finetune_operator.controller.create_backoff import (
    MAX_DELAY_SECONDS,
    MAX_TRIES_AT_ONCE,
    MAX_UNCHANGED_DELAY_SECONDS,
    UNCHANGED_AFTER,
    CreateBackoff,
)
from finetune_operator.failures.create_rejections import find_quota_capacity
from finetune_operator.observation.pods import RejectedCreate

FULL = RejectedCreate("Pod", "bert-0-1", 403, "exceeded quota: team")


class BackoffUnderTest(CreateBackoff):
    """Backoff whose clock is set by the test."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(clock=lambda: self.now)

    def run(self, jobs: list[JobKey], *, seconds: int) -> int:
        """Retry each job whenever it may, always without success; return the number of tries."""
        tries = 0
        for _ in range(seconds * 10):
            self.now += 0.1
            for key in jobs:
                if self.remaining_seconds(key) == 0.0:
                    self.record(key, (FULL,))
                    tries += 1
        return tries


def test_tries_are_delayed_more_and_more_and_most_if_nothing_changes() -> None:
    backoff, key, delays = BackoffUnderTest(), JobKey("team", "a"), []
    for number in range(2 * UNCHANGED_AFTER + 4):
        message = f"exceeded quota: {min(number, 10)}"
        backoff.record(key, (RejectedCreate("Pod", "a-0-0", 403, message),))
        delays.append(backoff.remaining_seconds(key))
        backoff.now += delays[-1]
    assert delays[0] <= 1.0
    assert MAX_DELAY_SECONDS / 2 <= delays[10] <= MAX_DELAY_SECONDS
    assert MAX_UNCHANGED_DELAY_SECONDS / 2 <= delays[-1] <= MAX_UNCHANGED_DELAY_SECONDS
    assert [backoff.get_last_rejection(key) is None] == [False]
    backoff.record(key, ())
    assert backoff.remaining_seconds(key) == 0.0


def test_many_jobs_together_try_at_most_twice_a_second() -> None:
    backoff, jobs = BackoffUnderTest(), [JobKey("team", str(number)) for number in range(300)]
    backoff.run(jobs, seconds=1)
    assert backoff.run(jobs, seconds=120) <= 2 * 120 + MAX_TRIES_AT_ONCE + 16


def test_a_change_in_the_namespace_permits_a_try_at_once() -> None:
    backoff, key, other = BackoffUnderTest(), JobKey("team", "a"), JobKey("other", "b")
    for _ in range(5):
        backoff.record(key, (FULL,))
        backoff.record(other, (FULL,))
    assert backoff.wake("team") == [key]
    assert backoff.remaining_seconds(key) == 0.0
    assert backoff.get_last_rejection(key) == FULL, "the try begins with a probe"
    assert backoff.remaining_seconds(other) > 0.0


def test_the_first_try_begins_with_a_probe_while_another_job_of_the_namespace_waits() -> None:
    backoff, new = BackoffUnderTest(), JobKey("team", "new")
    backoff.record(JobKey("other", "a"), (FULL,))
    assert backoff.get_last_rejection(new) is None

    backoff.record(JobKey("team", "a"), (FULL,))
    probe = backoff.get_last_rejection(new)

    assert probe is not None
    assert find_quota_capacity(probe.message) is None, "the pods of the other job may have another size"
    assert backoff.remaining_seconds(new) == 0.0


@pytest.mark.parametrize(
    ("message", "capacity"),
    [
        ("exceeded quota: team, requested: pods=1, used: pods=3, limited: pods=3", 3),
        ("exceeded quota: q, requested: count/pods=1,requests.nvidia.com/gpu=8, used: count/pods=2,"
         "requests.nvidia.com/gpu=16, limited: count/pods=9,requests.nvidia.com/gpu=20", 2),
        ("exceeded quota: q, requested: requests.cpu=500m, used: requests.cpu=3, limited: requests.cpu=3", 6),
        ("exceeded quota: q, requested: pods=0, used: pods=0, limited: pods=0", None),
        ("exceeded quota: q, requested: pods=x, used: pods=0, limited: pods=y", None),
        ("denied by the webhook", None),
    ],
)  # fmt: skip
def test_the_capacity_of_a_quota_is_read_from_the_message(message: str, capacity: int | None) -> None:
    assert find_quota_capacity(f'pods "a-0-1" is forbidden: {message}') == capacity
