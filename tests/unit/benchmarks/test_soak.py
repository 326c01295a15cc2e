"""Tests that the expected outcomes of `make soak` match the decisions of the operator."""

from datetime import timedelta

import pytest

from benchmarks.load.job_bodies import build_job_body
from benchmarks.soak.scripts import (
    DELETED,
    RESTART_POLICY,
    SCRIPTS,
    SUSPENSIONS,
    Script,
    ScriptAction,
    build_container_exit,
    plan_jobs,
)
from finetune_api.v1alpha1.job import FineTuneJob
from testing.builders.jobs import NOW, RawBody, build_observation, decide_once, finished_pod, job, running_pod

DELETIONS = (ScriptAction.DELETE_POD, ScriptAction.FORCE_DELETE_POD)
MAX_ATTEMPTS = 6


def create_job() -> FineTuneJob:
    # the job has no data loader processes, because a repair would reduce their number
    dataset = build_job_body("bert", 2)["spec"]["dataset"]
    current_job, _ = decide_once(job(restartPolicy=RESTART_POLICY, dataset=dataset), build_observation(job()))
    return current_job


def set_suspend(current_job: FineTuneJob, suspend: bool) -> FineTuneJob:
    return current_job.model_copy(update={"spec": current_job.spec.model_copy(update={"suspend": suspend})})


def simulate_attempt(current_job: FineTuneJob, action: ScriptAction, attempt_number: int) -> FineTuneJob:
    """Simulate an attempt of two nodes, perform the action on it and return the updated job."""
    if action is ScriptAction.RECREATE_JOB:
        return create_job()
    attempt, now = current_job.status.attempt or 0, NOW + timedelta(minutes=10 * attempt_number)
    pods = tuple(running_pod(current_job, rank, attempt=attempt) for rank in range(2))
    current_job, _ = decide_once(current_job, build_observation(current_job, *pods), now=now)
    present_pods: tuple[RawBody, ...] = ()
    gone_pods = pods
    current_job = set_suspend(current_job, action in SUSPENSIONS)
    if action not in (*DELETIONS, *SUSPENSIONS):
        code, reason, message = build_container_exit(action, time=now.timestamp())
        exit_fields: RawBody = {"exit_code": code, "reason": reason, "message": message, "finishedAt": now.isoformat()}
        ranks = (0, 1) if action is ScriptAction.SUCCEED else (0,)
        present_pods, gone_pods = (
            tuple(finished_pod(current_job, rank, attempt=attempt, **exit_fields) for rank in ranks),
            pods[len(ranks) :],
        )
        # the failure is observed before the operator has deleted the peers
        observation = build_observation(current_job, *present_pods, *gone_pods)
        current_job, _ = decide_once(current_job, observation, now=now)
    for _ in range(3):
        current_job, _ = decide_once(
            current_job, build_observation(current_job, *present_pods, tombstones=gone_pods), now=now
        )
    if action in SUSPENSIONS:
        assert current_job.status.phase == "Suspended"
        current_job = set_suspend(current_job, False)
    return current_job


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script.phase != DELETED], ids=str)
def test_job_ends_as_its_script_expects(script: Script) -> None:
    current_job = create_job()
    number = 0
    while current_job.status.completion_time is None and number < MAX_ATTEMPTS:
        current_job = simulate_attempt(current_job, script.get_action(number), number)
        number += 1

    assert (current_job.status.phase, current_job.status.attempts[-1].reason) == (script.phase, script.reason)
    assert len(script.actions) <= number


@pytest.mark.parametrize("seconds", [360, 7200])
def test_every_script_has_jobs_with_enough_time_for_all_actions(seconds: int) -> None:
    plans = plan_jobs(2 * len(SCRIPTS), seconds=seconds, seed=1)

    assert {plan.script for plan in plans} == set(SCRIPTS)
    assert len({plan.name for plan in plans}) == len(plans)
    assert max(plan.start_seconds for plan in plans) < 0.9 * seconds
    assert all(plan.run_seconds * len(plan.script.actions) < 0.3 * seconds for plan in plans)
