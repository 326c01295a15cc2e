"""Tests that polled progress, which can be forged, neither renews nor uses up the restart budget."""

from collections.abc import Iterator

import pytest

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.status import Phase, Progress, RestartCounts
from testing.builders.jobs import RawBody, decide_with, finished_pod, job, running_pod
from testing.builders.stopping import termination_message

POLICY = {"maxRestarts": 2, "maxInfrastructureRestarts": 2, "backoffSeconds": 0}


def build_job() -> FineTuneJob:
    owner = job(numNodes=1, restartPolicy=POLICY)
    return decide_with(owner)[0]


def fail_attempt(owner: FineTuneJob, *, polled_step: int | None, final_step: int | None) -> FineTuneJob:
    """Run the current attempt and let its pod fail with a message, or disappear without one if there is no step."""
    attempt = owner.status.attempts[-1].attempt
    polled = None if polled_step is None else Progress(step=polled_step)
    running = running_pod(owner, 0, attempt=attempt)
    ended: tuple[RawBody, ...] = ()
    tombstones: tuple[RawBody, ...] = ()
    if final_step is None:
        tombstones = (running,)
    else:
        message = termination_message(error_type="RankKilled", signal=9, rank=0, progress=Progress(step=final_step))
        ended = (finished_pod(owner, 0, attempt=attempt, message=message),)
    for pods, gone in (((running,), ()), (ended, tombstones), (ended, tombstones)):
        owner, _ = decide_with(owner, *pods, tombstones=gone, progress=polled)
    return owner


def count_attempts(polled_steps: Iterator[int], *, final_step: int | None) -> int:
    """Return the number of attempts until the job fails, with this polled step in each of them."""
    owner = build_job()
    for number, polled_step in zip(range(1, 20), polled_steps, strict=False):
        owner = fail_attempt(owner, polled_step=polled_step, final_step=final_step)
        if owner.status.phase is Phase.FAILED:
            return number
    raise AssertionError("the job did not fail")


@pytest.mark.parametrize("final_step", [0, None], ids=["with message", "without message"])
def test_rising_polled_steps_do_not_renew_the_budget(final_step: int | None) -> None:
    assert count_attempts(iter(range(10, 10_000, 10)), final_step=final_step) == 3


def test_a_huge_polled_step_does_not_prevent_the_renewal_of_the_budget() -> None:
    owner = build_job()
    for final_step in range(10, 200, 10):
        owner = fail_attempt(owner, polled_step=10**9, final_step=final_step)
        assert owner.status.without_progress == RestartCounts(counted=1, best_step=final_step)


def test_an_attempt_without_a_message_uses_one_restart_and_the_next_message_proves_its_progress() -> None:
    owner = fail_attempt(build_job(), polled_step=50, final_step=None)
    lost = owner.status
    owner = fail_attempt(owner, polled_step=60, final_step=55)

    assert (lost.attempts[0].reason, lost.without_progress) == ("PodDeleted", RestartCounts(infrastructure=1))
    assert lost.attempts[0].last_step == 50
    assert owner.status.without_progress == RestartCounts(counted=1, best_step=55)
