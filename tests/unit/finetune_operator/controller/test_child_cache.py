"""Tests of the child cache: index of children by job, and tombstones of deleted pods."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from finetune_operator import names
from finetune_operator.controller.child_cache import ChildCache, JobKey
from finetune_operator.controller.tombstones import MAX_OLD_TOMBSTONES, TOMBSTONE_TTL, Tombstone, prune_tombstones
from finetune_operator.observation.ownership import RawBody

KEY = JobKey("default", "job")
FOREVER = 10 * TOMBSTONE_TTL.total_seconds()


def pod(name: str = "a-0-0", *, attempt: int = 0, job: str = "job", uid: str = "", **fields: Any) -> RawBody:
    labels = {names.JOB_UID: job, names.ATTEMPT: str(attempt)}
    owner = {"apiVersion": names.API_VERSION, "kind": names.FINETUNEJOB_KIND, "name": "a", "uid": job}
    metadata = {"name": name, "namespace": "default", "uid": uid or name, "labels": labels}
    return {"metadata": {**metadata, "ownerReferences": [{**owner, "controller": True}]}, **fields}


def tombstone(name: str, *, attempt: int = 0, deleted_at: float = 0.0) -> Tombstone:
    return Tombstone(pod(name, attempt=attempt), deleted_at, attempt)


class CacheUnderTest:
    """Child cache whose clock and current attempts are set by the test; records the changed jobs."""

    def __init__(self) -> None:
        self.now = 0.0
        self.attempts: dict[JobKey, int | None] = {KEY: 0}
        self.changed: list[JobKey] = []
        self.children = ChildCache(
            on_change=self.changed.append,
            current_attempt=lambda key: self.attempts.get(key),
            is_current_pod=lambda _, pod: pod["metadata"]["uid"] != "foreign",
            clock=lambda: self.now,
        )


def test_modified_pod_replaces_its_older_version() -> None:
    cache = CacheUnderTest()
    cache.children.on_pod_event(None, pod())
    cache.children.on_pod_event(pod(), pod(status={"phase": "Running"}))
    assert cache.children.pods(KEY) == (pod(status={"phase": "Running"}),)


def test_a_deleted_pod_leaves_a_tombstone_with_its_last_state() -> None:
    cache = CacheUnderTest()
    cache.children.on_pod_event(None, pod())
    cache.children.on_pod_event(pod(status={"phase": "Failed"}), None)
    assert cache.children.pods(KEY) == ()
    assert cache.children.deleted_pods(KEY) == (pod(status={"phase": "Failed"}),)


def test_pod_with_a_changed_job_label_is_moved_to_the_other_job() -> None:
    cache = CacheUnderTest()
    cache.children.on_pod_event(None, pod())
    cache.children.on_pod_event(pod(), pod(job="other"))
    assert cache.children.pods(KEY) == ()
    assert cache.children.pods(JobKey("default", "other")) == (pod(job="other"),)


def test_object_without_job_label_is_ignored() -> None:
    cache = CacheUnderTest()
    unlabelled = {"metadata": {"name": "x", "namespace": "default", "uid": "x", "labels": {}}}
    cache.children.on_pod_event(None, unlabelled)
    cache.children.on_pod_event(unlabelled, None)
    assert cache.changed == []


def test_services_are_indexed_by_job_and_leave_no_tombstone() -> None:
    cache = CacheUnderTest()
    cache.children.on_service_event(None, pod("a"))
    assert cache.children.services(KEY) == (pod("a"),)
    cache.children.on_service_event(pod("a"), None)
    assert cache.children.services(KEY) == ()
    assert cache.children.deleted_pods(KEY) == ()


def test_a_foreign_pod_does_not_replace_a_tombstone() -> None:
    cache = CacheUnderTest()
    for uid in ("own", "foreign"):
        cache.children.on_pod_event(None, pod(uid=uid))
        cache.children.on_pod_event(pod(uid=uid), None)
    assert {tombstone["metadata"]["uid"] for tombstone in cache.children.deleted_pods(KEY)} == {"own", "foreign"}
    cache.now = TOMBSTONE_TTL.total_seconds()
    cache.children.prune()
    assert [tombstone["metadata"]["uid"] for tombstone in cache.children.deleted_pods(KEY)] == ["own"]


def test_tombstones_of_a_deleted_job_expire() -> None:
    cache = CacheUnderTest()
    cache.children.on_pod_event(None, pod())
    cache.children.forget(KEY)
    cache.attempts.clear()  # the garbage collector deletes pods after their job
    cache.children.on_pod_event(pod(), None)
    cache.now = TOMBSTONE_TTL.total_seconds()
    cache.children.prune()
    assert cache.children.deleted_pods(KEY) == ()


def test_one_tombstone_per_node_is_kept_for_the_current_attempt() -> None:
    tombstones = [tombstone(f"a-1-{rank}", attempt=1, deleted_at=rank) for rank in range(1000)]
    assert prune_tombstones(tombstones, current_attempt=1, now=FOREVER) == tuple(tombstones)


def test_only_the_newest_tombstone_of_a_pod_name_is_kept_for_the_current_attempt() -> None:
    tombstones = [tombstone("a-0-0", deleted_at=1.0), tombstone("a-0-0", deleted_at=2.0)]
    assert prune_tombstones(tombstones, current_attempt=0, now=3.0) == (tombstone("a-0-0", deleted_at=2.0),)


def test_tombstones_of_older_attempts_expire() -> None:
    tombstones = [tombstone("a-0-0", deleted_at=0.0), tombstone("a-0-1", deleted_at=10.0)]
    retained = prune_tombstones(tombstones, current_attempt=1, now=TOMBSTONE_TTL.total_seconds() + 5.0)
    assert retained == (tombstone("a-0-1", deleted_at=10.0),)


def test_the_number_of_tombstones_of_older_attempts_is_limited() -> None:
    tombstones = [tombstone(f"a-0-{rank}", deleted_at=rank) for rank in range(MAX_OLD_TOMBSTONES + 5)]
    assert prune_tombstones(tombstones, current_attempt=1, now=MAX_OLD_TOMBSTONES + 5.0) == tuple(tombstones[5:])


@given(
    tombstones=st.lists(
        st.builds(tombstone, st.sampled_from(["x", "y", "z"]), attempt=st.integers(0, 3), deleted_at=st.floats(0, 2000))
    ),
    current_attempt=st.none() | st.integers(0, 3),
    now=st.floats(2000, 3000),
)
def test_pruning_is_bounded_ordered_and_idempotent(
    tombstones: list[Tombstone], current_attempt: int | None, now: float
) -> None:
    retained = prune_tombstones(tombstones, current_attempt=current_attempt, now=now)
    assert list(retained) == sorted(retained, key=lambda item: item.deleted_at)
    assert prune_tombstones(retained, current_attempt=current_attempt, now=now) == retained
    assert len([t for t in retained if t.attempt != current_attempt]) <= MAX_OLD_TOMBSTONES
    names_before = {t.pod["metadata"]["name"] for t in tombstones if t.attempt == current_attempt}
    assert names_before == {t.pod["metadata"]["name"] for t in retained if t.attempt == current_attempt}


def test_ended_pods_are_reduced_once_and_other_pods_stay() -> None:
    cache = CacheUnderTest()
    running = pod("a-0-1", spec={}, status={"phase": "Running"})
    for body in (pod("a-0-0", spec={"nodeName": "n"}, status={"phase": "Failed", "message": "x"}), running):
        cache.children.on_pod_event(None, body)

    (reduced,) = cache.children.reduce_ended_pods(KEY)

    assert (reduced["metadata"]["name"], reduced["status"]) == ("a-0-0", {"phase": "Failed"})
    assert cache.children.pods(KEY) == (reduced, running)
    assert cache.children.reduce_ended_pods(KEY) == ()
    assert cache.children.reduce_ended_pods(JobKey("default", "unknown")) == ()
