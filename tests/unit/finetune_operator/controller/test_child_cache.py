"""Whose pods are whose, and what is remembered of pods that are gone."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from finetune_operator import names
from finetune_operator.controller.child_cache import Children, JobKey
from finetune_operator.controller.tombstones import KEPT, LIFETIME, Tombstone, keep_tombstones

Raw = dict[str, Any]
KEY = JobKey("default", "job")
FOREVER = 10 * LIFETIME.total_seconds()


def pod(name: str = "a-0-0", *, attempt: int = 0, job: str = "job", uid: str = "", **fields: Any) -> Raw:
    labels = {names.JOB_UID: job, names.ATTEMPT: str(attempt)}
    return {"metadata": {"name": name, "namespace": "default", "uid": uid or name, "labels": labels}, **fields}


def grave(name: str, *, attempt: int = 0, time: float = 0.0) -> Tombstone:
    return Tombstone(pod=pod(name, attempt=attempt), time=time)


class Family:
    """Children with a clock and a present attempt that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.attempts: dict[JobKey, int | None] = {KEY: 0}
        self.woken: list[JobKey] = []
        self.children = Children(
            on_change=self.woken.append, present_attempt=lambda key: self.attempts.get(key), clock=lambda: self.now
        )


def test_pods_are_found_by_job_and_changes_wake_it() -> None:
    family = Family()
    family.children.pod_changed(None, pod("a-0-0"))
    family.children.pod_changed(None, pod("b-0-0", job="other"))
    assert family.children.pods(KEY) == (pod("a-0-0"),)
    assert family.woken == [KEY, JobKey("default", "other")]


def test_a_changed_pod_replaces_itself() -> None:
    family = Family()
    family.children.pod_changed(None, pod())
    family.children.pod_changed(pod(), pod(status={"phase": "Running"}))
    assert family.children.pods(KEY) == (pod(status={"phase": "Running"}),)


def test_a_deleted_pod_is_remembered_as_it_was_last_seen() -> None:
    family = Family()
    family.children.pod_changed(None, pod())
    family.children.pod_changed(pod(status={"phase": "Failed"}), None)
    assert family.children.pods(KEY) == ()
    assert family.children.gone(KEY) == (pod(status={"phase": "Failed"}),)


def test_a_pod_that_changes_its_job_leaves_the_old_one() -> None:
    family = Family()
    family.children.pod_changed(None, pod())
    family.children.pod_changed(pod(), pod(job="other"))
    assert family.children.pods(KEY) == ()
    assert family.children.pods(JobKey("default", "other")) == (pod(job="other"),)


def test_an_object_without_our_label_is_nobodys() -> None:
    family = Family()
    stray = {"metadata": {"name": "x", "namespace": "default", "uid": "x", "labels": {}}}
    family.children.pod_changed(None, stray)
    family.children.pod_changed(stray, None)
    assert family.woken == []


def test_services_are_found_by_job_and_not_remembered() -> None:
    family = Family()
    family.children.service_changed(None, pod("a"))
    assert family.children.services(KEY) == (pod("a"),)
    family.children.service_changed(pod("a"), None)
    assert family.children.services(KEY) == ()
    assert family.children.gone(KEY) == ()


def test_pods_that_outlive_their_job_are_not_remembered_for_ever() -> None:
    family = Family()
    family.children.pod_changed(None, pod())
    family.children.forget(KEY)
    family.attempts.clear()  # the job is gone; the garbage collector's deletions come after it
    family.children.pod_changed(pod(), None)
    family.now = LIFETIME.total_seconds()
    family.children.sweep()
    assert family.children.gone(KEY) == ()


def test_evidence_of_the_present_attempt_is_kept_however_old() -> None:
    kept = keep_tombstones([grave("a-1-0", attempt=1)], present_attempt=1, now=FOREVER)
    assert kept == (grave("a-1-0", attempt=1),)


def test_evidence_of_the_present_attempt_is_kept_for_every_node() -> None:
    graves = [grave(f"a-1-{rank}", attempt=1, time=rank) for rank in range(1000)]
    assert keep_tombstones(graves, present_attempt=1, now=FOREVER) == tuple(graves)


def test_a_pod_made_again_under_its_name_leaves_its_last_tombstone() -> None:
    graves = [grave("a-0-0", time=1.0), grave("a-0-0", time=2.0)]
    assert keep_tombstones(graves, present_attempt=0, now=3.0) == (grave("a-0-0", time=2.0),)


def test_an_older_attempt_is_forgotten_after_a_while() -> None:
    graves = [grave("a-0-0", time=0.0), grave("a-0-1", time=10.0)]
    kept = keep_tombstones(graves, present_attempt=1, now=LIFETIME.total_seconds() + 5.0)
    assert kept == (grave("a-0-1", time=10.0),)


def test_of_older_attempts_only_the_last_few_are_kept() -> None:
    graves = [grave(f"a-0-{rank}", time=rank) for rank in range(KEPT + 5)]
    assert keep_tombstones(graves, present_attempt=1, now=KEPT + 5.0) == tuple(graves[5:])


@given(
    graves=st.lists(
        st.builds(grave, st.sampled_from(["x", "y", "z"]), attempt=st.integers(0, 3), time=st.floats(0, 2000))
    ),
    present=st.none() | st.integers(0, 3),
    now=st.floats(2000, 3000),
)
def test_keeping_is_bounded_ordered_and_repeatable(graves: list[Tombstone], present: int | None, now: float) -> None:
    kept = keep_tombstones(graves, present_attempt=present, now=now)
    assert list(kept) == sorted(kept, key=lambda tombstone: tombstone.time)
    assert keep_tombstones(kept, present_attempt=present, now=now) == kept
    assert len([t for t in kept if t.attempt != present]) <= KEPT
    newest = {t.pod["metadata"]["name"] for t in graves if t.attempt == present}
    assert newest == {t.pod["metadata"]["name"] for t in kept if t.attempt == present}
