"""Reasons: who is to blame decides what follows, and every failure comes with advice."""

import pytest

from finetune_api.v1alpha1.reasons import FailureAction, Reason
from finetune_api.v1alpha1.status import Fault

FAILURES = [reason for reason in Reason if reason.fault is not None]


@pytest.mark.parametrize("reason", FAILURES)
def test_who_is_to_blame_decides_what_follows(reason: Reason) -> None:
    """What only its user can mend is never simply tried again, what nobody is to blame for always."""
    may_retry = reason.fault not in (Fault.USER, Fault.RESOURCE)
    assert (reason.action is FailureAction.RESTART) is may_retry
    assert reason.action is not FailureAction.REPAIR or reason.fault is Fault.RESOURCE


@pytest.mark.parametrize("reason", FAILURES)
def test_every_failure_comes_with_advice_that_ends_a_sentence(reason: Reason) -> None:
    assert reason.advice
    assert reason.advice[0] == reason.advice[0].lower() or reason.advice.startswith("CUDA")
    assert not reason.advice.endswith(".")
    assert reason.meaning.endswith(".")


def test_what_is_no_failure_blames_nobody() -> None:
    assert all(not reason.advice for reason in Reason if reason.fault is None)
