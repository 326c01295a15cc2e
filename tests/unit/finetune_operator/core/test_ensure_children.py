"""Tests that a Service or ConfigMap is created again after a user deleted or edited it."""

from dataclasses import replace
from datetime import timedelta

import pytest

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_operator.core.actions import Action, Create, DeleteService, EmitEvent
from finetune_operator.observation.pods import Observation
from testing.builders.jobs import (
    NOW,
    RawBody,
    build_observation,
    decide_once,
    decide_with,
    finished_pod,
    job,
    pod,
    running_pod,
)

NOTHING = Observation(is_fresh=True)
MINUTE = timedelta(minutes=1)
SCHEDULED = [{"type": "PodScheduled", "status": "True", "lastTransitionTime": NOW.isoformat()}]


def created_job() -> FineTuneJob:
    """Return a job whose attempt 0 has all its children."""
    ftjob, _ = decide_once(job(), NOTHING)
    return decide_with(ftjob, pod(ftjob, 0), pod(ftjob, 1))[0]


def scheduled_pod(ftjob: FineTuneJob, node_rank: int) -> RawBody:
    """Return a pod scheduled at NOW."""
    return pod(ftjob, node_rank, conditions=SCHEDULED)


def list_created_kinds(actions: tuple[Action, ...]) -> list[str]:
    return [action.manifest["kind"] for action in actions if isinstance(action, Create)]


@pytest.mark.parametrize("state", [pod, running_pod], ids=["starting", "running"])
def test_a_deleted_service_is_created_again(state: object) -> None:
    ftjob = created_job()
    assert callable(state)
    observation = build_observation(ftjob, state(ftjob, 0), state(ftjob, 1))
    ftjob, _ = decide_once(ftjob, observation)

    assert list_created_kinds(decide_once(ftjob, observation)[1].actions) == []
    assert list_created_kinds(decide_once(ftjob, replace(observation, service_exists=False))[1].actions) == ["Service"]


def test_edited_service_is_deleted_even_while_pods_are_created() -> None:
    ftjob, _ = decide_once(job(), NOTHING)
    edited = replace(NOTHING, edited_service_uid="uid-9")

    assert DeleteService("bert", "uid-9") in decide_once(ftjob, edited)[1].actions


def test_service_of_a_finished_job_is_not_created_again() -> None:
    ftjob = created_job()
    for observation in (
        build_observation(
            ftjob,
            finished_pod(ftjob, 0, reason="StartError", exit_code=128, message="no command specified"),
            running_pod(ftjob, 1),
        ),
        NOTHING,
    ):
        ftjob, _ = decide_once(ftjob, observation)
    assert ftjob.status.completion_time is not None

    assert decide_once(ftjob, NOTHING)[1].actions == ()


def test_config_map_is_created_again_for_a_pod_waiting_for_its_volumes() -> None:
    ftjob = created_job()
    observation = build_observation(ftjob, scheduled_pod(ftjob, 0), running_pod(ftjob, 1))

    early = decide_once(ftjob, observation, now=NOW + MINUTE / 2)[1]
    assert (list_created_kinds(early.actions), early.requeue_after) == ([], MINUTE / 2)
    late = decide_once(ftjob, observation, now=NOW + MINUTE)[1]
    assert (list_created_kinds(late.actions), late.requeue_after) == (["ConfigMap"], MINUTE)
    assert [action.reason for action in late.actions if isinstance(action, EmitEvent)] == ["ContainerCreating"]
    created = next(action for action in late.actions if isinstance(action, Create))
    assert created.name == "ConfigMap bert-0-11111111"


@pytest.mark.parametrize(
    "status",
    [
        pytest.param({"conditions": []}, id="not scheduled"),
        pytest.param(
            {"containerStatuses": [{"name": "trainer", "state": {"waiting": {"reason": "ErrImagePull"}}}]},
            id="waiting for a reported reason",
        ),
        pytest.param(
            {"conditions": [*SCHEDULED, {**SCHEDULED[0], "type": "PodReadyToStartContainers"}]}, id="volumes mounted"
        ),
    ],
)
def test_config_map_is_not_created_if_the_pod_is_pending_for_another_reason(status: RawBody) -> None:
    ftjob = created_job()
    waiting_pod = scheduled_pod(ftjob, 0)
    waiting_pod["status"].update(status)

    decision = decide_with(ftjob, waiting_pod, running_pod(ftjob, 1), now=NOW + MINUTE)[1]
    assert list_created_kinds(decision.actions) == []
    assert decision.requeue_after != MINUTE
