"""Tests of the expectations between a request and its watch event."""

from finetune_operator.controller.child_cache import JobKey
from finetune_operator.controller.expectations import EXPECTATION_TIMEOUT_SECONDS, Expectations
from finetune_operator.core.actions import Create, DeletePod, EmitEvent

KEY = JobKey("default", "u1")
OTHER_KEY = JobKey("default", "u2")


class Clock:
    """Clock that a test sets, in seconds."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def create(kind: str, name: str) -> Create:
    return Create({"kind": kind, "metadata": {"name": name}})


def test_created_children_are_expected_until_the_timeout() -> None:
    clock = Clock()
    expectations = Expectations(clock=clock)
    assert expectations.record(KEY, [create("Pod", "a-0-0"), create("Service", "a")], {})
    assert expectations.list_created(KEY, "Pod") == {"a-0-0"}
    assert expectations.list_created(KEY, "Service") == {"a"}
    assert expectations.list_created(OTHER_KEY, "Pod") == frozenset()

    clock.time += EXPECTATION_TIMEOUT_SECONDS
    assert expectations.list_created(KEY, "Pod") == frozenset()
    assert not expectations.record(KEY, [EmitEvent("Normal", "Running", "", "running-0")], {})


def test_created_pods_of_the_newest_attempt_are_remembered() -> None:
    clock = Clock()
    expectations = Expectations(clock=clock)
    expectations.record(KEY, [create("ConfigMap", "a-0-u"), create("Pod", "a-0-0")], {"a-0-0": "uid"})
    clock.time += 2 * EXPECTATION_TIMEOUT_SECONDS
    assert expectations.list_created_pods(KEY) == {"a-0-0": "uid"}
    expectations.record(KEY, [create("Pod", "a-0-1")], {"a-0-1": "uid"})
    assert expectations.list_created_pods(KEY) == {"a-0-0": "uid", "a-0-1": "uid"}

    expectations.record(KEY, [create("Pod", "a-1-0")], {"a-1-0": "uid"})
    assert expectations.list_created_pods(KEY) == {"a-1-0": "uid"}
    expectations.forget_created_pods(KEY)
    assert expectations.list_created_pods(KEY) == {}


def test_the_grace_period_of_a_deletion_is_remembered_until_the_timeout() -> None:
    clock = Clock()
    expectations = Expectations(clock=clock)
    assert expectations.record(KEY, [DeletePod("a-0-0", "uid-0", 120)], {})
    clock.time += EXPECTATION_TIMEOUT_SECONDS / 2
    assert expectations.record(KEY, [DeletePod("a-0-1", "uid-1", 10)], {})
    assert expectations.list_deletions(KEY) == {"uid-0": 120, "uid-1": 10}

    clock.time += EXPECTATION_TIMEOUT_SECONDS / 2
    assert expectations.list_deletions(KEY) == {"uid-1": 10}
    expectations.forget(KEY)
    assert expectations.list_deletions(KEY) == {}
