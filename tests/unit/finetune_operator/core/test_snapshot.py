"""Tests that later attempts use what the job began with, also after an upgrade of the operator."""

from dataclasses import replace
from typing import Any

import pytest

from finetune_api.v1alpha1.job import FineTuneJob, FineTuneJobSpec
from finetune_api.v1alpha1.recorded_defaults import render_defaults
from finetune_operator.core.snapshot import find_image_digest
from finetune_operator.observation.pods import observe_pod
from finetune_operator.plan.run_plan import plan_run
from testing.builders.jobs import SETTINGS, RawBody, decide_with, job, running_pod

UPGRADED = replace(SETTINGS, trainer_image="registry.example/trainer:v2", version="2.0.0")
SHA = "sha256:" + "a" * 64
PULLED = f"registry.example/trainer@{SHA}"


def build_running_pods(owner: FineTuneJob, *, image_id: str = PULLED, attempt: int = 0) -> list[RawBody]:
    pods = [running_pod(owner, rank, attempt=attempt) for rank in (0, 1)]
    for body in pods:
        body["status"]["containerStatuses"][0]["imageID"] = image_id
    return pods


def start_attempt(owner: FineTuneJob, **pod_fields: Any) -> FineTuneJob:
    begun, _ = decide_with(owner)
    running, _ = decide_with(begun, *build_running_pods(begun, **pod_fields))
    return running


def suspend(owner: FineTuneJob) -> FineTuneJob:
    """Return the job after its pods were deleted because spec.suspend was set."""
    owner = owner.model_copy(update={"spec": owner.spec.model_copy(update={"suspend": True})})
    for _ in range(2):
        owner, _ = decide_with(owner)
    return owner.model_copy(update={"spec": owner.spec.model_copy(update={"suspend": False})})


def test_the_first_attempt_records_image_release_and_defaults() -> None:
    settings = replace(SETTINGS, version="1.0.0")
    begun, _ = decide_with(job(), settings=settings)

    snapshot = begun.status.snapshot

    assert snapshot is not None
    assert (snapshot.image, snapshot.is_default_image) == (SETTINGS.trainer_image, True)
    assert snapshot.operator_version == "1.0.0"
    assert snapshot.defaults == render_defaults(FineTuneJobSpec)


def test_after_an_upgrade_the_next_attempt_uses_the_digest_of_the_first() -> None:
    running = start_attempt(job())
    resumed, _ = decide_with(suspend(running), settings=UPGRADED)

    assert resumed.status.attempt == 1
    assert plan_run(resumed, attempt=1, settings=UPGRADED).image == PULLED


def test_without_a_digest_the_next_attempt_uses_the_image_of_the_first() -> None:
    running = start_attempt(job(), image_id=SHA)
    resumed, _ = decide_with(suspend(running), settings=UPGRADED)

    assert plan_run(resumed, attempt=1, settings=UPGRADED).image == SETTINGS.trainer_image


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        pytest.param(None, "registry.example/own:1", "registry.example/own:1", id="set"),
        pytest.param("registry.example/own:1", "registry.example/own:2", "registry.example/own:2", id="changed"),
        pytest.param("registry.example/own:1", None, UPGRADED.trainer_image, id="removed"),
        pytest.param(None, UPGRADED.trainer_image, UPGRADED.trainer_image, id="image of the new release"),
    ],
)
def test_an_image_that_was_changed_while_suspended_is_used(
    first: str | None, second: str | None, expected: str
) -> None:
    suspended = suspend(start_attempt(job(image=first)))
    changed = job(image=second).model_copy(update={"status": suspended.status})

    resumed, _ = decide_with(changed, settings=UPGRADED)

    assert plan_run(resumed, attempt=1, settings=UPGRADED).image == expected
    assert not any(c.type == "TrainerImageOutdated" for c in resumed.status.conditions)


def test_a_condition_names_the_newer_image() -> None:
    running = start_attempt(job())
    upgraded, _ = decide_with(running, *build_running_pods(running), settings=UPGRADED)

    condition = next(c for c in upgraded.status.conditions if c.type == "TrainerImageOutdated")

    assert (condition.status, condition.reason) == ("True", "NewerTrainerImage")
    assert "to use registry.example/trainer:v2, set spec.suspend to true" in condition.message


def test_a_running_job_of_a_release_without_snapshots_keeps_the_image_of_its_pods() -> None:
    running = start_attempt(job())
    without_snapshot = running.model_copy(update={"status": running.status.model_copy(update={"snapshot": None})})
    pods = build_running_pods(without_snapshot)

    upgraded, _ = decide_with(without_snapshot, *pods, settings=UPGRADED)

    assert upgraded.status.snapshot is not None
    assert (upgraded.status.snapshot.image, upgraded.status.snapshot.image_digest) == (SETTINGS.trainer_image, PULLED)


@pytest.mark.parametrize(
    ("image", "image_id", "expected"),
    [
        ("registry.example/trainer:v1", PULLED, PULLED),
        ("registry.example/trainer:v1", f"docker-pullable://{PULLED}", PULLED),
        ("registry.example:5000/a/trainer", f"registry.example:5000/a/trainer@{SHA}", None),
        ("pytorch:2", f"docker.io/library/pytorch@{SHA}", None),
        ("team/trainer:2", f"docker.io/team/trainer@{SHA}", None),
        (f"registry.example/trainer:v1@{SHA}", PULLED, PULLED),
        ("registry.example/trainer:v1", SHA, ""),
        ("registry.example/trainer:v1", f"docker.io/library/import-2026-01-01@{SHA}", ""),
        ("registry.example/trainer:v1", f"{PULLED} --rm", ""),
        ("registry.example/trainer:v1", "", ""),
    ],
)
def test_only_a_digest_of_the_same_repository_is_used(image: str, image_id: str, expected: str | None) -> None:
    body = build_running_pods(job(image=image), image_id=image_id)[0]
    node = observe_pod(body, is_tombstone=False)

    assert node is not None
    assert find_image_digest(node, image) == (image_id if expected is None else expected)


def test_an_image_that_a_user_edited_in_the_pod_is_not_recorded() -> None:
    body = build_running_pods(job())[0]
    body["spec"]["containers"][0]["image"] = "registry.example/trainer:edited"
    node = observe_pod(body, is_tombstone=False)

    assert node is not None
    assert find_image_digest(node, SETTINGS.trainer_image) == ""
