"""A container that somebody injected beside the trainer and that never ends keeps no machine."""

from datetime import timedelta

import pytest

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_operator.core.actions import DeletePod
from finetune_operator.observation.pods import Observation
from testing.builders.jobs import NOW, Raw, job, pod, running, seen, step

NOTHING = Observation(fresh=True)
HALF_A_MINUTE = timedelta(seconds=30)


def outlived(of: FineTuneJob, node_rank: int, *, exit_code: int = 0, outcome: str = "succeeded") -> Raw:
    """The trainer's container ended at NOW, and the pod goes on."""
    message = f'{{"final": true, "outcome": "{outcome}"}}'
    state = {"terminated": {"exitCode": exit_code, "message": message, "finishedAt": NOW.isoformat()}}
    proxy = {"name": "proxy", "state": {"running": {"startedAt": NOW.isoformat()}}}
    return pod(of, node_rank, phase="Running", containerStatuses=[proxy, {"name": "trainer", "state": state}])


def at_rest(of: FineTuneJob, observation: Observation) -> FineTuneJob:
    for _ in range(4):
        of, _ = step(of, observation)
    return of


@pytest.mark.parametrize("fields", [{}, {"ttlSecondsAfterFinished": 3600}], ids=["for good", "until its TTL"])
def test_pods_of_a_job_that_is_over_are_deleted_if_something_else_keeps_them(fields: Raw) -> None:
    of, _ = step(job(**fields), NOTHING)
    both = seen(of, outlived(of, 0), outlived(of, 1))
    of = at_rest(of, both)
    assert of.status.completion_time is not None

    early = step(of, both)[1]
    assert (early.actions, early.requeue_after) == ((), HALF_A_MINUTE)
    late = step(of, both, now=NOW + HALF_A_MINUTE)[1]
    assert [action.name for action in late.actions if isinstance(action, DeletePod)] == ["bert-0-0", "bert-0-1"]


def test_so_are_those_of_a_suspended_job() -> None:
    of, _ = step(job(), NOTHING)
    of, _ = step(of, seen(of, running(of, 0), running(of, 1)))
    of = of.model_copy(update={"spec": of.spec.model_copy(update={"suspend": True})})
    both = seen(of, *(outlived(of, rank, exit_code=143, outcome="stopped") for rank in range(2)))
    of = at_rest(of, both)
    assert of.status.attempts[-1].state == "Stopped"

    assert step(of, both)[1].requeue_after == HALF_A_MINUTE
    late = step(of, both, now=NOW + HALF_A_MINUTE)[1]
    assert [action.name for action in late.actions if isinstance(action, DeletePod)] == ["bert-0-0", "bert-0-1"]


def test_pods_that_ended_stay_for_their_logs() -> None:
    of, _ = step(job(), NOTHING)
    ended = [outlived(of, rank) for rank in range(2)]
    for body in ended:
        body["status"]["phase"] = "Succeeded"
    of = at_rest(of, seen(of, *ended))

    late = step(of, seen(of, *ended), now=NOW + timedelta(hours=1))[1]
    assert (late.actions, late.requeue_after) == ((), None)
