"""What `make soak` expects of its jobs is what the operator decides."""

import json
from datetime import timedelta

import pytest

from benchmarks.load import job_body
from benchmarks.rig import count_passes
from benchmarks.soak.scripts import GONE, MOST_ACTS, RESTART_POLICY, SCRIPTS, Act, Script, how_it_ends, plan_jobs
from finetune_api.v1alpha1.job import FineTuneJob
from testing.builders.jobs import NOW, Raw, ended, job, running, seen, step

DELETIONS = (Act.DELETE_POD, Act.DELETE_POD_BY_FORCE)
MOST_ATTEMPTS = 6


def after(of: FineTuneJob, act: Act, number: int) -> FineTuneJob:
    """The job once an attempt of two nodes ran and this happened to it."""
    attempt, now = of.status.attempt or 0, NOW + timedelta(minutes=10 * number)
    pods = tuple(running(of, rank, attempt=attempt) for rank in range(2))
    of, _ = step(of, seen(of, *pods), now=now)
    there: tuple[Raw, ...] = ()
    gone = pods
    if act not in DELETIONS:
        code, reason, message = how_it_ends(act, time=now.timestamp())
        how: Raw = {"exit_code": code, "reason": reason, "message": message, "finishedAt": now.isoformat()}
        ranks = (0, 1) if act is Act.SUCCEED else (0,)
        there, gone = tuple(ended(of, rank, attempt=attempt, **how) for rank in ranks), pods[len(ranks) :]
    for _ in range(3):
        of, _ = step(of, seen(of, *there, gone=gone), now=now)
    return of


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script.phase != GONE], ids=str)
def test_a_job_ends_as_its_script_says(script: Script) -> None:
    rows = job_body("bert", 2)["spec"]["dataset"]  # without loader processes, of which there could be fewer
    of, _ = step(job(restartPolicy=RESTART_POLICY, dataset=rows), seen(job()))
    number = 0
    while of.status.completion_time is None and number < MOST_ATTEMPTS:
        of = after(of, script.act(number), number)
        number += 1

    assert (of.status.phase, of.status.attempts[-1].reason) == (script.phase, script.reason)
    assert len(script.acts) <= number <= max(len(script.acts), MOST_ACTS)


def test_every_script_has_its_jobs_and_time_for_its_acts() -> None:
    plans = plan_jobs(2 * len(SCRIPTS), seconds=1800, seed=1)

    assert {plan.script for plan in plans} == set(SCRIPTS)
    assert len({plan.name for plan in plans}) == len(plans)
    assert all(plan.start + plan.run_seconds * len(plan.script.acts) < 1800 for plan in plans)


def test_last_words_are_json() -> None:
    messages = [how_it_ends(act, time=1.0)[2] for act in Act if act not in (*DELETIONS, Act.DELETE_JOB)]

    assert [json.loads(message)["outcome"] for message in messages if message].count("failed") == 4


def test_passes_are_counted_by_the_bucket_that_they_fall_into() -> None:
    text = "\n".join(
        f'finetune_reconcile_seconds_bucket{{le="{le}",result="{result}"}} {count}'
        for result, counts in (("changed", (3.0, 5.0, 5.0)), ("unchanged", (1.0, 1.0, 2.0)))
        for le, count in zip(("0.001", "0.01", "+Inf"), counts, strict=True)
    )

    assert count_passes(text) == {0.001: 4, 0.01: 2, float("inf"): 1}
