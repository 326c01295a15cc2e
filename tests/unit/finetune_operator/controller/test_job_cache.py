"""Which of two bodies of a job is the newer one, and which job is gone."""

from typing import Any

import pytest

from finetune_operator.controller.child_cache import JobKey
from finetune_operator.controller.job_cache import Jobs, job_label

Raw = dict[str, Any]
KEY = JobKey("default", "u1")


def body(version: str, *, uid: str = "u1", **fields: Any) -> Raw:
    return {"metadata": {"name": "a", "namespace": "default", "uid": uid, "resourceVersion": version}, **fields}


def test_a_newer_body_replaces_an_older_one() -> None:
    jobs = Jobs()
    assert jobs.offer(body("1"))
    assert jobs.offer(body("2", spec=2))
    assert jobs.get(KEY) == body("2", spec=2)


@pytest.mark.parametrize(
    ("known", "offered"),
    [
        pytest.param("9", "9", id="our own write, back from the watch"),
        pytest.param("10", "9", id="an event from before our own write"),
    ],
)
def test_what_is_not_newer_is_no_news(known: str, offered: str) -> None:
    jobs = Jobs()
    jobs.offer(body(known, spec="known"))
    assert not jobs.offer(body(offered, spec="offered"))
    assert jobs.get(KEY) == body(known, spec="known")


def test_versions_that_are_no_numbers_go_by_delivery() -> None:
    jobs = Jobs()
    jobs.offer(body("zebra"))
    assert jobs.offer(body("ant"))
    assert jobs.get(KEY) == body("ant")


def test_a_job_made_again_under_its_name_is_another_job() -> None:
    jobs = Jobs()
    jobs.offer(body("9"))
    assert jobs.offer(body("10", uid="u2"))
    assert set(jobs) == {KEY, JobKey("default", "u2")}


def test_managed_fields_are_not_kept() -> None:
    jobs = Jobs()
    offered = body("1")
    offered["metadata"]["managedFields"] = [{"manager": "kubectl"}]
    jobs.offer(offered)
    assert jobs.get(KEY) == body("1")
    assert "managedFields" in offered["metadata"], "kopf's object is not ours to change"


def test_a_list_shows_which_jobs_are_gone() -> None:
    jobs = Jobs()
    for version, uid in (("5", "listed"), ("6", "gone"), ("12", "younger than the list")):
        jobs.offer(body(version, uid=uid))
    missing = jobs.missing_from([body("5", uid="listed")], list_version="10")
    assert missing == (JobKey("default", "gone"),)


def test_phases_are_counted_and_a_job_without_status_is_queued() -> None:
    jobs = Jobs()
    for number, phase in enumerate(("Running", "Running", "Failed")):
        jobs.offer(body("1", uid=f"u{number}", status={"phase": phase}))
    jobs.offer(body("1", uid="new"))
    assert jobs.count_phases() == {"Running": 2, "Failed": 1, "Queued": 1}


@pytest.mark.parametrize(("status", "attempt"), [({}, None), ({"attempt": 0}, 0), ({"attempt": 3}, 3)])
def test_the_present_attempt_comes_from_the_status(status: Raw, attempt: int | None) -> None:
    jobs = Jobs()
    jobs.offer(body("1", status=status))
    assert jobs.attempt(KEY) == attempt
    assert jobs.attempt(JobKey("default", "nobody")) is None


def test_people_call_a_job_by_namespace_and_name() -> None:
    assert job_label(body("1")) == "default/a"
