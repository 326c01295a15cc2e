"""Tests that a pod is deleted after its trainer has terminated even if a sidecar is still running."""

from datetime import timedelta

import pytest

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_operator.core.actions import DeletePod
from finetune_operator.observation.pods import Observation
from testing.builders.jobs import NOW, RawBody, build_observation, decide_once, decide_with, job, pod, running_pod

NOTHING = Observation(is_fresh=True)
HALF_A_MINUTE = timedelta(seconds=30)


def pod_with_running_sidecar(
    ftjob: FineTuneJob, node_rank: int, *, exit_code: int = 0, outcome: str = "succeeded"
) -> RawBody:
    """Return a pod whose trainer terminated at NOW and whose proxy sidecar is still running."""
    message = f'{{"final": true, "outcome": "{outcome}"}}'
    state = {"terminated": {"exitCode": exit_code, "message": message, "finishedAt": NOW.isoformat()}}
    proxy = {"name": "proxy", "state": {"running": {"startedAt": NOW.isoformat()}}}
    return pod(ftjob, node_rank, phase="Running", containerStatuses=[proxy, {"name": "trainer", "state": state}])


def run_four_passes(ftjob: FineTuneJob, observation: Observation) -> FineTuneJob:
    for _ in range(4):
        ftjob, _ = decide_once(ftjob, observation)
    return ftjob


@pytest.mark.parametrize("fields", [{}, {"ttlSecondsAfterFinished": 3600}], ids=["no TTL", "with a TTL"])
def test_pods_of_a_finished_job_are_deleted_if_a_sidecar_is_running(fields: RawBody) -> None:
    ftjob, _ = decide_once(job(**fields), NOTHING)
    observation = build_observation(ftjob, pod_with_running_sidecar(ftjob, 0), pod_with_running_sidecar(ftjob, 1))
    ftjob = run_four_passes(ftjob, observation)
    assert ftjob.status.completion_time is not None

    early = decide_once(ftjob, observation)[1]
    assert (early.actions, early.requeue_after) == ((), HALF_A_MINUTE)
    late = decide_once(ftjob, observation, now=NOW + HALF_A_MINUTE)[1]
    assert [action.name for action in late.actions if isinstance(action, DeletePod)] == ["bert-0-0", "bert-0-1"]


def test_pods_of_a_suspended_job_are_deleted_if_a_sidecar_is_running() -> None:
    ftjob, _ = decide_once(job(), NOTHING)
    ftjob, _ = decide_with(ftjob, running_pod(ftjob, 0), running_pod(ftjob, 1))
    ftjob = ftjob.model_copy(update={"spec": ftjob.spec.model_copy(update={"suspend": True})})
    observation = build_observation(
        ftjob, *(pod_with_running_sidecar(ftjob, rank, exit_code=143, outcome="stopped") for rank in range(2))
    )
    ftjob = run_four_passes(ftjob, observation)
    assert ftjob.status.attempts[-1].state == "Stopped"

    assert decide_once(ftjob, observation)[1].requeue_after == HALF_A_MINUTE
    late = decide_once(ftjob, observation, now=NOW + HALF_A_MINUTE)[1]
    assert [action.name for action in late.actions if isinstance(action, DeletePod)] == ["bert-0-0", "bert-0-1"]


def test_terminated_pods_are_kept_for_their_logs() -> None:
    ftjob, _ = decide_once(job(), NOTHING)
    ended = [pod_with_running_sidecar(ftjob, rank) for rank in range(2)]
    for body in ended:
        body["status"]["phase"] = "Succeeded"
    ftjob = run_four_passes(ftjob, build_observation(ftjob, *ended))

    late = decide_with(ftjob, *ended, now=NOW + timedelta(hours=1))[1]
    assert (late.actions, late.requeue_after) == ((), None)
