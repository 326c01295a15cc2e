"""Tests that the expected outcomes of `make soak` match the decisions of the operator."""

import json
from datetime import timedelta

import pytest

from benchmarks.load import job_body
from benchmarks.rig import count_passes
from benchmarks.soak.scripts import DELETED, MAX_ACTS, RESTART_POLICY, SCRIPTS, Act, Script, build_exit, plan_jobs
from finetune_api.v1alpha1.job import FineTuneJob
from testing.builders.jobs import NOW, RawBody, decide_once, ended_pod, job, observation_of, running_pod

DELETIONS = (Act.DELETE_POD, Act.DELETE_POD_BY_FORCE)
MAX_ATTEMPTS = 6


def run_attempt(current: FineTuneJob, act: Act, attempt_number: int) -> FineTuneJob:
    """Run an attempt of two nodes, perform the act on it and return the job."""
    attempt, now = current.status.attempt or 0, NOW + timedelta(minutes=10 * attempt_number)
    pods = tuple(running_pod(current, rank, attempt=attempt) for rank in range(2))
    current, _ = decide_once(current, observation_of(current, *pods), now=now)
    present_pods: tuple[RawBody, ...] = ()
    gone_pods = pods
    if act not in DELETIONS:
        code, reason, message = build_exit(act, time=now.timestamp())
        exit_fields: RawBody = {"exit_code": code, "reason": reason, "message": message, "finishedAt": now.isoformat()}
        ranks = (0, 1) if act is Act.SUCCEED else (0,)
        present_pods, gone_pods = (
            tuple(ended_pod(current, rank, attempt=attempt, **exit_fields) for rank in ranks),
            pods[len(ranks) :],
        )
    for _ in range(3):
        current, _ = decide_once(current, observation_of(current, *present_pods, tombstones=gone_pods), now=now)
    return current


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script.phase != DELETED], ids=str)
def test_job_ends_as_its_script_expects(script: Script) -> None:
    dataset = job_body("bert", 2)["spec"]["dataset"]  # a dataset without data loader workers, whose number could change
    current, _ = decide_once(job(restartPolicy=RESTART_POLICY, dataset=dataset), observation_of(job()))
    number = 0
    while current.status.completion_time is None and number < MAX_ATTEMPTS:
        current = run_attempt(current, script.act(number), number)
        number += 1

    assert (current.status.phase, current.status.attempts[-1].reason) == (script.phase, script.reason)
    assert len(script.acts) <= number <= max(len(script.acts), MAX_ACTS)


def test_every_script_has_jobs_with_enough_time_for_all_acts() -> None:
    plans = plan_jobs(2 * len(SCRIPTS), seconds=1800, seed=1)

    assert {plan.script for plan in plans} == set(SCRIPTS)
    assert len({plan.name for plan in plans}) == len(plans)
    assert all(plan.start + plan.run_seconds * len(plan.script.acts) < 1800 for plan in plans)


def test_termination_messages_are_json() -> None:
    messages = [build_exit(act, time=1.0)[2] for act in Act if act not in (*DELETIONS, Act.DELETE_JOB)]

    assert [json.loads(message)["outcome"] for message in messages if message].count("failed") == 4


def test_passes_are_counted_per_histogram_bucket() -> None:
    text = "\n".join(
        f'finetune_reconcile_seconds_bucket{{le="{le}",result="{result}"}} {count}'
        for result, counts in (("changed", (3.0, 5.0, 5.0)), ("unchanged", (1.0, 1.0, 2.0)))
        for le, count in zip(("0.001", "0.01", "+Inf"), counts, strict=True)
    )

    assert count_passes(text) == {0.001: 4, 0.01: 2, float("inf"): 1}
