"""Tests of the job cache, including the comparison of resource versions."""

from typing import Any

import pytest

from finetune_operator.controller.child_cache import JobKey
from finetune_operator.controller.job_cache import JobCache, get_namespaced_name
from finetune_operator.observation.ownership import RawBody

KEY = JobKey("default", "u1")


def job_body(version: str, *, uid: str = "u1", **fields: Any) -> RawBody:
    return {"metadata": {"name": "a", "namespace": "default", "uid": uid, "resourceVersion": version}, **fields}


def test_a_newer_body_replaces_an_older_one() -> None:
    jobs = JobCache()
    assert jobs.store_if_newer(job_body("1"))
    assert jobs.store_if_newer(job_body("2", spec=2))
    assert jobs.get(KEY) == job_body("2", spec=2)


@pytest.mark.parametrize(
    ("cached_version", "delivered_version"),
    [
        pytest.param("9", "9", id="watch event of our own write"),
        pytest.param("10", "9", id="event older than our own write"),
    ],
)
def test_body_is_stored_only_if_it_is_newer(cached_version: str, delivered_version: str) -> None:
    jobs = JobCache()
    jobs.store_if_newer(job_body(cached_version, spec="cached"))
    assert not jobs.store_if_newer(job_body(delivered_version, spec="delivered"))
    assert jobs.get(KEY) == job_body(cached_version, spec="cached")


def test_last_delivered_body_wins_if_versions_are_not_numeric() -> None:
    jobs = JobCache()
    jobs.store_if_newer(job_body("zebra"))
    assert jobs.store_if_newer(job_body("ant"))
    assert jobs.get(KEY) == job_body("ant")


def test_recreated_job_of_the_same_name_has_a_different_key() -> None:
    jobs = JobCache()
    jobs.store_if_newer(job_body("9"))
    assert jobs.store_if_newer(job_body("10", uid="u2"))
    assert set(jobs) == {KEY, JobKey("default", "u2")}


def test_managed_fields_are_not_stored() -> None:
    jobs = JobCache()
    delivered = job_body("1")
    delivered["metadata"]["managedFields"] = [{"manager": "kubectl"}]
    jobs.store_if_newer(delivered)
    assert jobs.get(KEY) == job_body("1")
    assert "managedFields" in delivered["metadata"], "kopf's object must not be modified"


def test_jobs_not_in_a_list_are_missing_unless_newer_than_the_list() -> None:
    jobs = JobCache()
    for version, uid in (("5", "listed"), ("6", "deleted"), ("12", "newer than the list")):
        jobs.store_if_newer(job_body(version, uid=uid))
    missing = jobs.find_missing_jobs([job_body("5", uid="listed")], list_version="10")
    assert missing == (JobKey("default", "deleted"),)


def test_jobs_are_counted_by_phase_and_a_job_without_status_counts_as_queued() -> None:
    jobs = JobCache()
    for number, phase in enumerate(("Running", "Running", "Failed")):
        jobs.store_if_newer(job_body("1", uid=f"u{number}", status={"phase": phase}))
    jobs.store_if_newer(job_body("1", uid="new"))
    assert jobs.count_phases() == {"Running": 2, "Failed": 1, "Queued": 1}


@pytest.mark.parametrize(("status", "attempt"), [({}, None), ({"attempt": 0}, 0), ({"attempt": 3}, 3)])
def test_the_current_attempt_is_read_from_the_status(status: RawBody, attempt: int | None) -> None:
    jobs = JobCache()
    jobs.store_if_newer(job_body("1", status=status))
    assert jobs.current_attempt(KEY) == attempt
    assert jobs.current_attempt(JobKey("default", "unknown")) is None


def test_log_name_includes_the_namespace() -> None:
    assert get_namespaced_name(job_body("1")) == "default/a"
