"""Tests of the job cache, including the comparison of resource versions."""

from typing import Any

import pytest

from finetune_operator.controller.child_cache import JobKey
from finetune_operator.controller.job_cache import MAX_PARSED_JOBS, JobCache
from finetune_operator.kube.resource_versions import StateRolledBack
from finetune_operator.observation.ownership import RawBody

KEY = JobKey("default", "u1")


@pytest.fixture
def jobs() -> JobCache:
    return JobCache()


def job_body(version: str, *, uid: str = "u1", **fields: Any) -> RawBody:
    return {"metadata": {"name": "a", "namespace": "default", "uid": uid, "resourceVersion": version}, **fields}


@pytest.mark.parametrize(
    ("cached_version", "delivered_version"),
    [
        pytest.param("9", "9", id="watch event of our own write"),
        pytest.param("10", "9", id="event older than our own write"),
    ],
)
def test_body_is_stored_only_if_it_is_newer(jobs: JobCache, cached_version: str, delivered_version: str) -> None:
    jobs.store_if_newer(job_body(cached_version, spec="cached"))
    assert not jobs.store_if_newer(job_body(delivered_version, spec="delivered"))
    assert jobs.get(KEY) == job_body(cached_version, spec="cached")


def test_last_delivered_body_wins_if_versions_are_not_numeric(jobs: JobCache) -> None:
    jobs.store_if_newer(job_body("zebra"))
    assert jobs.store_if_newer(job_body("ant"))
    assert jobs.get(KEY) == job_body("ant")


@pytest.mark.parametrize("field", ["managedFields", "annotations", "labels"])
def test_unused_metadata_is_not_stored(jobs: JobCache, field: str) -> None:
    delivered = job_body("1")
    delivered["metadata"][field] = {"kubectl.kubernetes.io/last-applied-configuration": "{}"}
    jobs.store_if_newer(delivered)
    assert jobs.get(KEY) == job_body("1")
    assert field in delivered["metadata"], "kopf's object must not be modified"


def test_a_job_is_parsed_once_until_a_newer_body_is_stored(jobs: JobCache) -> None:
    jobs.store_if_newer(job_body("1"))
    body = jobs.get(KEY)
    assert jobs.get(KEY) is body

    jobs.store_if_newer(job_body("2"))
    assert jobs.get(KEY) == job_body("2")
    jobs.remove(KEY)
    assert jobs.get(KEY) is None


def test_the_number_of_parsed_jobs_is_limited(jobs: JobCache) -> None:
    keys = [JobKey("default", f"uid-{number}") for number in range(MAX_PARSED_JOBS + 1)]
    for key in keys:
        body = job_body("1")
        jobs.store_if_newer({**body, "metadata": {**body["metadata"], "uid": key.uid}})
    bodies = [jobs.get(key) for key in keys]

    assert jobs.get(keys[-1]) is bodies[-1]
    assert jobs.get(keys[0]) is not bodies[0]
    assert jobs.get(keys[0]) == bodies[0]


def test_text_that_is_not_valid_unicode_is_stored(jobs: JobCache) -> None:
    jobs.store_if_newer(job_body("1", spec={"name": "\ud800"}))
    assert jobs.get(KEY) == job_body("1", spec={"name": "\ud800"})


def test_a_listed_job_older_than_the_cached_one_is_detected_unless_it_was_stored_after_the_list(jobs: JobCache) -> None:
    jobs.store_if_newer(job_body("1000"))
    jobs.check_listed_version(job_body("900"), list_version="999")  # our own write after the LIST
    jobs.check_listed_version(job_body("1000"), list_version="1500")
    jobs.check_listed_version(job_body("7", uid="unknown"), list_version="1500")
    with pytest.raises(StateRolledBack, match="default/a: the API server went back from resourceVersion 1000 to 900"):
        jobs.check_listed_version(job_body("900"), list_version="1500")


def test_the_newest_version_is_the_largest_number(jobs: JobCache) -> None:
    assert jobs.newest_version() == ""
    for version, uid in (("9", "a"), ("10", "b"), ("zebra", "c")):
        jobs.store_if_newer(job_body(version, uid=uid))
    assert jobs.newest_version() == "10"


@pytest.mark.parametrize(("status", "is_finished"), [({}, False), ({"completionTime": "2026-01-01T00:00:00Z"}, True)])
def test_a_job_with_a_completion_time_is_finished(jobs: JobCache, status: RawBody, is_finished: bool) -> None:
    jobs.store_if_newer(job_body("1", status=status))
    assert jobs.is_finished(KEY) is is_finished
    assert not jobs.is_finished(JobKey("default", "unknown"))


def test_jobs_not_in_a_list_are_missing_unless_newer_than_the_list(jobs: JobCache) -> None:
    for version, uid in (("5", "listed"), ("6", "deleted"), ("12", "newer than the list")):
        jobs.store_if_newer(job_body(version, uid=uid))
    missing = jobs.find_missing_jobs({JobKey("default", "listed")}, list_version="10")
    assert missing == (JobKey("default", "deleted"),)


def test_jobs_are_counted_by_phase_and_a_job_without_status_counts_as_queued(jobs: JobCache) -> None:
    for number, phase in enumerate(("Running", "Running", "Failed")):
        jobs.store_if_newer(job_body("1", uid=f"u{number}", status={"phase": phase}))
    jobs.store_if_newer(job_body("1", uid="new"))
    assert jobs.count_phases() == {"Running": 2, "Failed": 1, "Queued": 1}


@pytest.mark.parametrize(("status", "attempt"), [({}, None), ({"attempt": 0}, 0), ({"attempt": 3}, 3)])
def test_the_current_attempt_is_read_from_the_status(jobs: JobCache, status: RawBody, attempt: int | None) -> None:
    jobs.store_if_newer(job_body("1", status=status))
    assert jobs.current_attempt(KEY) == attempt
    assert jobs.current_attempt(JobKey("default", "unknown")) is None
