"""Tests of the state machine of stop requests."""

from __future__ import annotations

import pytest

from finetune_supervisor import contract
from finetune_supervisor.stop_request import StopAction, StopRequest

RUNNING = StopRequest(grace_seconds=60)
SAVING = StopRequest(grace_seconds=60, requested_at=100.0)
TERMINATED = StopRequest(
    grace_seconds=60, requested_at=100.0, terminated_at=110.0, reason="stopped before training began"
)
TOO_EARLY_REASON = "stopped before training began"
SECOND_SIGNAL_REASON = "stopped by a second signal; no checkpoint was saved"
GRACE_OVER_REASON = "the ranks did not end within the grace period of 60s (FINETUNE_GRACE_SECONDS)"


def advance(
    stop: StopRequest,
    *,
    signal_count: int = 1,
    phase: str = contract.TRAIN,
    is_command: bool = False,
    now: float = 100.0,
) -> tuple[StopRequest, tuple[StopAction, ...]]:
    return stop.advance(signal_count=signal_count, phase=phase, is_command=is_command, now=now)


def test_no_action_is_taken_without_a_signal() -> None:
    assert advance(RUNNING, signal_count=0) == (RUNNING, ())


@pytest.mark.parametrize("phase", [contract.TRAIN, contract.EVAL, contract.SAVE, contract.PUBLISH, contract.DONE])
def test_first_signal_requests_a_checkpoint_from_the_trainer(phase: str) -> None:
    stop, actions = advance(RUNNING, phase=phase)

    assert actions == (StopAction.SAVE,)
    assert (stop.is_requested, stop.requested_at, stop.reason) == (True, 100.0, "")


@pytest.mark.parametrize("phase", ["", contract.INIT, contract.LOAD])
def test_first_signal_before_training_terminates_the_ranks(phase: str) -> None:
    stop, actions = advance(RUNNING, phase=phase)

    assert actions == (StopAction.TERMINATE,)
    assert (stop.requested_at, stop.terminated_at, stop.reason) == (100.0, 100.0, TOO_EARLY_REASON)


@pytest.mark.parametrize("phase", ["", contract.INIT, contract.TRAIN])
def test_first_signal_is_forwarded_to_a_command(phase: str) -> None:
    stop, actions = advance(RUNNING, phase=phase, is_command=True)

    assert actions == (StopAction.FORWARD,)
    assert (stop.is_requested, stop.reason) == (True, "")


def test_two_simultaneous_signals_request_a_checkpoint_and_terminate_the_ranks() -> None:
    stop, actions = advance(RUNNING, signal_count=2)

    assert actions == (StopAction.SAVE, StopAction.TERMINATE)
    assert stop.reason == SECOND_SIGNAL_REASON


def test_second_signal_terminates_the_ranks_without_a_checkpoint() -> None:
    stop, actions = advance(SAVING, signal_count=2, now=105.0)

    assert actions == (StopAction.TERMINATE,)
    assert (stop.terminated_at, stop.reason) == (105.0, SECOND_SIGNAL_REASON)


@pytest.mark.parametrize(
    ("grace_seconds", "now", "has_expired"),
    [
        pytest.param(60, 155.0, False, id="five seconds before the kubelet's SIGKILL"),
        pytest.param(60, 155.1, True, id="less than five seconds before SIGKILL"),
        pytest.param(4, 102.0, False, id="half of a short grace period"),
        pytest.param(4, 102.1, True, id="more than half of a short grace period"),
    ],
)
def test_ranks_are_terminated_shortly_before_the_grace_period_expires(
    grace_seconds: float, now: float, has_expired: bool
) -> None:
    stop, actions = advance(StopRequest(grace_seconds=grace_seconds, requested_at=100.0), now=now)

    assert actions == ((StopAction.TERMINATE,) if has_expired else ())
    assert stop.reason == (GRACE_OVER_REASON.replace("60", str(grace_seconds)) if has_expired else "")


@pytest.mark.parametrize(("now", "actions"), [(113.0, ()), (113.1, (StopAction.KILL,)), (900.0, (StopAction.KILL,))])
def test_sigkill_is_sent_three_seconds_after_sigterm_and_repeated(now: float, actions: tuple[StopAction, ...]) -> None:
    assert advance(TERMINATED, now=now) == (TERMINATED, actions)


def test_further_signals_do_not_change_the_reason() -> None:
    assert advance(TERMINATED, signal_count=3, now=111.0) == (TERMINATED, ())
