"""Tests that decisions about projected objects equal decisions about whole objects."""

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_operator import names
from finetune_operator.controller.child_cache import get_owning_job_key
from finetune_operator.controller.progress_poller import find_rank_zero_host
from finetune_operator.core.decide import decide
from finetune_operator.core.degraded import decide_degraded
from finetune_operator.observation.ownership import JobOwner, find_controlling_owner, has_job_label
from finetune_operator.observation.pods import Observation, observe_pod, observe_pods
from finetune_operator.observation.projection import project_ended_pod, project_job, project_pod, project_service
from finetune_operator.plan.manifests import build_service, is_intact_headless_service
from finetune_operator.plan.run_plan import plan_run
from testing.builders.jobs import NOW, SETTINGS, UID, RawBody, build_observation, finished_pod, job, running_pod

TIMES = st.sampled_from(["2026-01-01T12:00:00Z", "2026-01-01T12:00:05.5Z", None])
TEXTS = st.sampled_from(["", "Error", "OOMKilled", "ImagePullBackOff", "ContainerCreating"]) | st.text(max_size=80)
MESSAGES = TEXTS | st.sampled_from(
    [
        '{"final": true, "outcome": "failed", "message": "x", "rank": 3}',
        '{"final": true, "outcome": "succeeded"}',
        "x" * 2000,
    ]
)
UNKNOWN = st.dictionaries(
    st.sampled_from(["future", "other"]), st.integers() | st.text() | st.lists(st.text()), max_size=2
)


def any_of(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return objects with any of these fields, and sometimes with fields that no schema contains."""
    known = st.fixed_dictionaries({}, optional=fields)
    return st.builds(lambda extra, body: {**extra, **body}, UNKNOWN, known)


RUNNING = any_of(startedAt=TIMES)
WAITING = any_of(reason=TEXTS, message=MESSAGES)
TERMINATED = any_of(
    exitCode=st.integers(0, 255),
    reason=TEXTS,
    signal=st.integers(1, 64),
    message=MESSAGES,
    finishedAt=TIMES,
    startedAt=TIMES,
)
STATES = st.none() | any_of(running=RUNNING, waiting=WAITING, terminated=TERMINATED)
CONTAINERS = any_of(
    restartCount=st.integers(0, 3) | st.none(), state=STATES, lastState=STATES, image=TEXTS, imageID=TEXTS
).flatmap(lambda body: st.sampled_from([names.CONTAINER, "istio-proxy"]).map(lambda name: {**body, "name": name}))
CONDITION_TYPES = (
    "PodScheduled",
    "PodReadyToStartContainers",
    "DisruptionTarget",
    "TerminationTarget",
    "Ready",
    "future",
)
CONDITIONS = any_of(
    status=st.sampled_from(["True", "False", "Unknown"]), reason=TEXTS, message=MESSAGES, lastTransitionTime=TIMES
).flatmap(lambda body: st.sampled_from(CONDITION_TYPES).map(lambda name: {**body, "type": name}))
STATUSES = any_of(
    phase=st.sampled_from(["Pending", "Running", "Succeeded", "Failed", "Unknown"]),
    reason=TEXTS,
    message=MESSAGES,
    podIP=st.sampled_from(["10.0.0.1", "fd00::2", ""]),
    podIPs=st.just([{"ip": "10.0.0.1"}]),
    conditions=st.none() | st.lists(CONDITIONS, max_size=5),
    containerStatuses=st.none() | st.lists(CONTAINERS, max_size=3),
    initContainerStatuses=st.none() | st.lists(CONTAINERS, max_size=2),
)
OWNERS = any_of(
    kind=st.sampled_from(["FineTuneJob", "Job"]), uid=st.sampled_from([UID, "other"]), controller=st.booleans()
).map(lambda owner: {"name": "bert", "apiVersion": names.API_VERSION, **owner})
METADATA = any_of(
    uid=st.just("pod-uid"),
    deletionTimestamp=TIMES,
    deletionGracePeriodSeconds=st.none() | st.integers(0, 2**63),
    labels=st.none() | any_of(**{names.JOB_UID: st.sampled_from([UID, "other"]), names.ATTEMPT: TEXTS, "user": TEXTS}),
    annotations=st.dictionaries(TEXTS, TEXTS, max_size=2),
    ownerReferences=st.none() | st.lists(OWNERS, max_size=2),
).flatmap(
    lambda body: st.sampled_from(["bert-0-0", "bert-3-1", "bert-0-0-x", "other"]).map(
        lambda name: {**body, "name": name, "namespace": "default", "resourceVersion": "7"}
    )
)
TRAINER_SPECS: tuple[list[RawBody], ...] = (
    [],
    [{"name": "proxy", "image": "p"}],
    [{"name": "trainer"}],
    [{"name": "trainer", "image": "t:1"}],
)
PODS = any_of(
    metadata=METADATA,
    spec=st.none()
    | any_of(
        nodeName=st.sampled_from(["gpu-1", ""]),
        containers=st.sampled_from(TRAINER_SPECS),
        schedulingGates=st.none() | st.just([{"name": "acme.example/approval"}]),
    ),
    status=st.none() | STATUSES,
).filter(lambda pod: "metadata" in pod)


@settings(max_examples=2000)
@given(pod=PODS, is_tombstone=st.booleans())
def test_observation_of_a_projected_pod_equals_that_of_the_whole_pod(pod: RawBody, is_tombstone: bool) -> None:
    projected = project_pod(pod)

    assert observe_pod(projected, is_tombstone=is_tombstone) == observe_pod(pod, is_tombstone=is_tombstone)


@settings(max_examples=500)
@given(pod=PODS)
def test_owner_job_and_address_of_a_projected_pod_equal_those_of_the_whole_pod(pod: RawBody) -> None:
    projected = project_pod(pod)

    owner, projected_owner = find_controlling_owner(pod), find_controlling_owner(projected)
    assert {**owner, **projected_owner} == owner
    assert [projected_owner.get(field) for field in ("apiVersion", "kind", "name", "uid")] == [
        owner.get(field) for field in ("apiVersion", "kind", "name", "uid")
    ]
    assert has_job_label(projected) == has_job_label(pod)
    if pod["metadata"].get("labels") is not None:
        assert get_owning_job_key(projected) == get_owning_job_key(pod)
    if pod.get("status") is not None:
        hosts = {find_rank_zero_host((body,), job=JobOwner("bert", UID), attempt=0) for body in (pod, projected)}
        assert len(hosts) == 1


def build_finished_job() -> FineTuneJob:
    finished = decide(job(), build_observation(job()), NOW, SETTINGS).status
    return job(status=finished.model_copy(update={"completion_time": NOW}), ttlSecondsAfterFinished=100)


@settings(max_examples=500)
@given(pod=PODS, seconds=st.integers(0, 200))
def test_decision_about_a_finished_job_needs_only_the_identity_of_its_ended_pods(pod: RawBody, seconds: int) -> None:
    reduced = project_ended_pod(pod)
    if reduced is None:
        assert (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")
        return
    finished, now = build_finished_job(), NOW + timedelta(seconds=seconds)
    raw_job = {"metadata": {"uid": UID}, "spec": {}}

    whole, projected = (
        (
            decide(finished, Observation(nodes=observe_pods((body,), ()), service_exists=True), now, SETTINGS),
            decide_degraded(raw_job, finished.status, (body,), now, problem="x", settings=SETTINGS),
        )
        for body in (pod, reduced)
    )

    assert projected == whole
    assert get_owning_job_key(reduced) == get_owning_job_key(project_pod(pod))


@pytest.mark.parametrize(
    "pod", [running_pod(job(), 0), {"metadata": {"name": "a"}}], ids=["running", "without a status"]
)
def test_a_pod_that_may_run_is_not_reduced(pod: RawBody) -> None:
    assert project_ended_pod(pod) is None


def test_projection_drops_everything_that_is_not_read() -> None:
    pod = finished_pod(job(), 0)
    projected = project_pod(pod)

    assert set(projected["spec"]) == {"nodeName", "containers"}
    assert [set(container) for container in projected["spec"]["containers"]] == [{"name", "image"}]
    assert names.JOB_NAME not in projected["metadata"]["labels"]


@pytest.mark.parametrize("edit", [{}, {"clusterIP": "10.0.0.1"}, {"selector": {}}, {"publishNotReadyAddresses": False}])
def test_a_projected_service_is_intact_if_the_whole_service_is(edit: RawBody) -> None:
    service = build_service(plan_run(job(), attempt=0, settings=SETTINGS))
    service["spec"] = {**service["spec"], **edit, "sessionAffinity": "None"}

    projected = project_service(service)

    assert is_intact_headless_service(projected, UID) == is_intact_headless_service(service, UID) == (not edit)
    assert find_controlling_owner(projected)["uid"] == UID
    assert "ports" not in projected["spec"]


def test_a_projected_job_parses_to_the_same_job_without_labels_and_annotations() -> None:
    times = {"creationTimestamp": "2026-01-01T00:00:00Z", "deletionTimestamp": "2026-01-01T00:00:01Z"}
    metadata = {"name": "bert", "namespace": "default", "uid": UID, "generation": 3, "resourceVersion": "9", **times}
    body = {"metadata": metadata, "spec": job().spec.model_dump(mode="json", by_alias=True, exclude_unset=True)}
    unread = {"labels": {"a": "b"}, "annotations": {"c": "d"}, "managedFields": [{}]}

    assert project_job({**body, "metadata": {**metadata, **unread}}) == body


def test_deletion_of_an_ended_pod_is_kept_for_the_return_of_its_quota() -> None:
    metadata = {
        "name": "bert-0-0",
        "deletionTimestamp": "2026-01-01T12:00:00Z",
        "finalizers": ["kueue.x-k8s.io/managed"],
    }

    reduced = project_ended_pod({"metadata": metadata, "status": {"phase": "Failed"}})

    assert reduced is not None
    assert {key: reduced["metadata"][key] for key in metadata} == metadata
