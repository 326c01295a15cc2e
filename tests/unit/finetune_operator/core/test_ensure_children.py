"""What people delete and edit of an attempt's Service and ConfigMap, and what is done about it."""

from dataclasses import replace
from datetime import timedelta

import pytest

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_operator.core.actions import Action, Create, DeleteService, Emit
from finetune_operator.observation.pods import Observation
from testing.builders.jobs import NOW, Raw, ended, job, pod, running, seen, step

NOTHING = Observation(fresh=True)
MINUTE = timedelta(minutes=1)
PLACED = [{"type": "PodScheduled", "status": "True", "lastTransitionTime": NOW.isoformat()}]


def begun() -> FineTuneJob:
    """A job whose attempt 0 was decided and made."""
    of, _ = step(job(), NOTHING)
    return step(of, seen(of, pod(of, 0), pod(of, 1)))[0]


def placed(of: FineTuneJob, node_rank: int) -> Raw:
    """A pod that the scheduler gave a machine at NOW."""
    return pod(of, node_rank, conditions=PLACED)


def kinds(actions: tuple[Action, ...]) -> list[str]:
    return [action.manifest["kind"] for action in actions if isinstance(action, Create)]


@pytest.mark.parametrize("state", [pod, running], ids=["starting", "running"])
def test_a_service_that_was_deleted_is_made_again(state: object) -> None:
    of = begun()
    assert callable(state)
    there = seen(of, state(of, 0), state(of, 1))
    of, _ = step(of, there)

    assert kinds(step(of, there)[1].actions) == []
    assert kinds(step(of, replace(there, service_exists=False))[1].actions) == ["Service"]


def test_a_service_that_was_edited_goes_and_is_made_anew() -> None:
    of = begun()
    there = seen(of, running(of, 0), running(of, 1))
    edited = replace(there, service_exists=False, edited_service="uid-9")

    assert step(of, edited)[1].actions[-1:] == (DeleteService("bert", "uid-9"),)


def test_an_edited_service_goes_before_the_pods_are_made_too() -> None:
    of, _ = step(job(), NOTHING)
    edited = replace(NOTHING, edited_service="uid-9")

    assert DeleteService("bert", "uid-9") in step(of, edited)[1].actions


def test_a_job_that_is_over_needs_no_service() -> None:
    of = begun()
    for observation in (
        seen(of, ended(of, 0, reason="StartError", exit_code=128, message="no command specified"), running(of, 1)),
        NOTHING,
    ):
        of, _ = step(of, observation)
    assert of.status.completion_time is not None

    assert step(of, NOTHING)[1].actions == ()


def test_the_config_map_is_made_again_for_a_pod_that_neither_starts_nor_says_why() -> None:
    of = begun()
    there = seen(of, placed(of, 0), running(of, 1))

    early = step(of, there, now=NOW + MINUTE / 2)[1]
    assert (kinds(early.actions), early.requeue_after) == ([], MINUTE / 2)
    late = step(of, there, now=NOW + MINUTE)[1]
    assert (kinds(late.actions), late.requeue_after) == (["ConfigMap"], MINUTE)
    assert [action.reason for action in late.actions if isinstance(action, Emit)] == ["ContainerCreating"]
    made = next(action for action in late.actions if isinstance(action, Create))
    assert made.name == "ConfigMap bert-0"


@pytest.mark.parametrize(
    "status",
    [
        pytest.param({"conditions": []}, id="without a machine"),
        pytest.param(
            {"containerStatuses": [{"name": "trainer", "state": {"waiting": {"reason": "ErrImagePull"}}}]},
            id="it says why",
        ),
        pytest.param(
            {"conditions": [*PLACED, {**PLACED[0], "type": "PodReadyToStartContainers"}]}, id="it has its volumes"
        ),
    ],
)
def test_a_pod_that_waits_for_something_else_needs_no_config_map(status: Raw) -> None:
    of = begun()
    waits = placed(of, 0)
    waits["status"].update(status)

    decision = step(of, seen(of, waits, running(of, 1)), now=NOW + MINUTE)[1]
    assert kinds(decision.actions) == []
    assert decision.requeue_after != MINUTE
