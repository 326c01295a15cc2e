"""Tests of the cache and API server reads of a reconcile pass."""

from dataclasses import replace
from datetime import timedelta

import pytest

from finetune_api.v1alpha1.status import AttemptState, Progress
from finetune_operator import names
from finetune_operator.controller.gather import CachedState
from finetune_operator.controller.progress_poller import PolledDegradations
from finetune_operator.plan.manifests import build_service
from finetune_operator.plan.run_plan import plan_run
from finetune_supervisor.messages import Degradation
from testing.builders.jobs import (
    NOW,
    SETTINGS,
    RawBody,
    finished_pod,
    job,
    pod,
    running_pod,
    terminating_pod,
)
from testing.builders.passes import (
    CLAIMS,
    CREATES,
    LIST,
    LIST_BY_NAME,
    RUNNING_JOB,
    STARTING_JOB,
    build_cached_state,
    build_raw_job,
    compute_status_after_observations,
    list_create_requests,
    read_written_status,
    run_pass,
    running_pods,
)
from testing.builders.stopping import KILLED
from testing.fakes.recording_cluster import RecordingCluster


async def test_only_pods_missing_from_the_list_are_read_by_name() -> None:
    unlabelled_pod = running_pod(job(), 1)
    unlabelled_pod["metadata"]["labels"] = {}
    cluster = RecordingCluster(pods=(running_pod(job(), 0),), unlisted_pods={"bert-0-1": unlabelled_pod})
    result = await run_pass(cluster, RUNNING_JOB, build_cached_state(running_pod(job(), 0)))

    assert cluster.requests == [LIST, "get Pod default/bert-0-1", "write status"]
    assert read_written_status(result).attempts[-1].evidence[1].deleted

    cluster.pods = ()
    result = await run_pass(
        cluster, result.job, build_cached_state(deleted_pods=(terminating_pod(finished_pod(job(), 0)),))
    )
    requests = ["write status", "delete Pod bert-0-1 pod-0-1 within 120 s"]
    assert cluster.requests[3:] == [LIST, "get Pod default/bert-0-1", *requests]


async def test_pod_with_labels_of_the_job_but_another_owner_is_ignored() -> None:
    foreign_pod = running_pod(job(), 1)
    foreign_pod["metadata"]["ownerReferences"][0]["uid"] = "another"
    cluster = RecordingCluster(pods=(running_pod(job(), 0), foreign_pod))
    result = await run_pass(cluster, RUNNING_JOB, build_cached_state(running_pod(job(), 0), foreign_pod))

    assert read_written_status(result).attempts[-1].state is AttemptState.STOPPING


async def test_children_are_created_only_after_an_uncached_list() -> None:
    cluster = RecordingCluster()
    await run_pass(cluster, STARTING_JOB)

    assert sorted(cluster.requests[:3]) == sorted([*CLAIMS, LIST_BY_NAME])
    assert cluster.requests[3:] == CREATES


async def test_listed_pod_missing_from_the_cache_is_not_created_again() -> None:
    cluster = RecordingCluster(pods=(pod(job(), 0),))
    await run_pass(cluster, STARTING_JOB)

    assert list_create_requests(cluster) == [line for line in CREATES if line != "create Pod bert-0-0"]


async def test_listed_pod_missing_from_the_cache_counts_as_running() -> None:
    cluster = RecordingCluster(pods=running_pods())
    result = await run_pass(cluster, RUNNING_JOB, build_cached_state(running_pod(job(), 0)))

    assert cluster.requests == [LIST]  # claims are read only before the attempt starts
    assert result.requeue_after is None


async def test_cached_pod_missing_from_the_list_counts_as_deleted_and_is_not_created_again() -> None:
    cluster = RecordingCluster(pods=())
    result = await run_pass(cluster, STARTING_JOB, build_cached_state(pod(job(), 0)))

    assert list_create_requests(cluster) == []
    assert read_written_status(result).attempts[-1].evidence[0].deleted


async def test_claims_are_checked_before_pods_are_created() -> None:
    cluster = RecordingCluster(access_modes={"models": ["ReadWriteOnce"]})
    result = await run_pass(cluster, STARTING_JOB)

    assert read_written_status(result).attempts[-1].reason == "InvalidSpec"
    assert list_create_requests(cluster) == []


async def test_created_pods_and_service_are_expected_until_their_events_arrive() -> None:
    job_body = build_raw_job(compute_status_after_observations())
    cluster = RecordingCluster(pods=(pod(job(), 0),))
    expected = CachedState(
        pods=(pod(job(), 0),),
        expected_pods=frozenset({"bert-0-0", "bert-0-1"}),
        expected_services=frozenset({"bert"}),
        time_since_status_write=timedelta(),
    )
    await run_pass(cluster, job_body, expected)
    assert cluster.requests == []  # neither a LIST nor a create

    await run_pass(cluster, job_body, replace(expected, expected_pods=frozenset({"bert-0-0"})))
    assert LIST_BY_NAME in cluster.requests
    assert list_create_requests(cluster) == ["create ConfigMap bert-0-11111111", "create Pod bert-0-1"]


async def test_expected_pod_that_was_deleted_stops_the_attempt() -> None:
    cached = build_cached_state(
        pod(job(), 0), deleted_pods=(terminating_pod(pod(job(), 1)),), expected_pods=frozenset({"bert-0-0", "bert-0-1"})
    )
    cluster = RecordingCluster(pods=(pod(job(), 0),))
    result = await run_pass(cluster, STARTING_JOB, cached)

    assert read_written_status(result).attempts[-1].state is AttemptState.STOPPING
    assert list_create_requests(cluster) == []


async def test_claims_are_not_read_once_the_children_of_an_attempt_were_created() -> None:
    killed_pods = (finished_pod(job(), 0, **KILLED), finished_pod(job(), 1, **KILLED))
    failed = compute_status_after_observations(running_pods(), killed_pods, killed_pods)
    cluster = RecordingCluster(access_modes={"models": ["ReadWriteOnce"]})
    await run_pass(cluster, build_raw_job(failed))

    assert failed.attempt == 1
    assert not set(CLAIMS) & set(cluster.requests)
    assert "create Pod bert-1-0" in cluster.requests


async def test_progress_of_an_earlier_attempt_is_ignored() -> None:
    cluster = RecordingCluster()
    stale = Progress(step=5, update_time=NOW - timedelta(seconds=1))
    await run_pass(cluster, RUNNING_JOB, build_cached_state(*running_pods(), progress=stale))

    assert cluster.requests == []


@pytest.mark.parametrize("attempt", [0, 1])
async def test_degradations_of_another_attempt_are_ignored(attempt: int) -> None:
    report = PolledDegradations(attempt, (Degradation("IdleGpus", "2 of 4 GPUs are idle"),))
    job_body = build_raw_job(compute_status_after_observations(running_pods()))

    result = await run_pass(RecordingCluster(), job_body, build_cached_state(*running_pods(), degradations=report))

    assert [each.reason for each in read_written_status(result).degraded] == (["IdleGpus"] if attempt == 0 else [])


async def test_foreign_service_is_not_used_as_the_service_of_the_job() -> None:
    foreign = {"metadata": {"name": "bert", "ownerReferences": [{"uid": "another", "controller": True}]}}
    cluster = RecordingCluster(pods=running_pods())
    await run_pass(cluster, STARTING_JOB, CachedState(pods=running_pods(), services=(foreign,)))

    assert "create Service bert" in cluster.requests


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param({"selector": {"app": "theirs"}}, id="other selector"),
        pytest.param({"publishNotReadyAddresses": False}, id="no DNS names before readiness"),
        pytest.param({"type": "ExternalName", "externalName": "example.com", "clusterIP": ""}, id="other type"),
    ],
)
async def test_edited_service_is_deleted_but_an_intact_service_is_kept(edit: RawBody) -> None:
    service = build_service(plan_run(job(), attempt=0, settings=SETTINGS))
    metadata = {**service["metadata"], "uid": "uid-9"}
    intact = {"metadata": metadata, "spec": {**service["spec"], "type": "ClusterIP", "sessionAffinity": "None"}}
    edited = {"metadata": metadata, "spec": {**service["spec"], **edit}}
    job_body = build_raw_job(compute_status_after_observations(running_pods()))
    for existing, requests in ((intact, []), (edited, ["delete Service bert uid-9"])):
        cluster = RecordingCluster(pods=running_pods())
        await run_pass(cluster, job_body, CachedState(pods=running_pods(), services=(existing,)))
        assert cluster.requests == requests


@pytest.mark.parametrize("is_orphaned", [pytest.param(False, id="deleted"), pytest.param(True, id="orphaned")])
async def test_no_pod_is_created_while_a_pod_of_a_deleted_job_of_the_same_name_runs(is_orphaned: bool) -> None:
    """A command writes to the same output folder; its pods have other names if the deleted job had restarted."""
    predecessor = running_pod(job(), 1, attempt=2)
    if is_orphaned:  # the garbage collector removes the owner reference for `kubectl delete --cascade=orphan`
        predecessor["metadata"]["ownerReferences"] = []
        predecessor["metadata"]["labels"][names.JOB_UID] = "uid-of-the-deleted-job"
    else:
        predecessor["metadata"]["ownerReferences"][0]["uid"] = "uid-of-the-deleted-job"
    cluster = RecordingCluster(pods=(predecessor,))
    first = await run_pass(cluster, STARTING_JOB)

    assert list_create_requests(cluster) == []
    assert first.job["status"]["waiting"]["reason"] == "PredecessorTerminating"
    assert "bert-2-1 of a deleted job" in first.job["status"]["waiting"]["message"]

    await run_pass(cluster := RecordingCluster(), first.job)
    assert list_create_requests(cluster) == CREATES


async def test_an_attempt_after_one_that_was_stopped_at_its_start_waits_for_pods_of_a_deleted_job() -> None:
    status = compute_status_after_observations()
    stopped = status.attempts[0].model_copy(update={"state": AttemptState.STOPPED})
    following = status.attempts[0].model_copy(update={"attempt": 1})
    status = status.model_copy(update={"attempt": 1, "attempts": (stopped, following)})
    predecessor = running_pod(job(), 0)
    predecessor["metadata"]["ownerReferences"][0]["uid"] = "uid-of-the-deleted-job"
    cluster = RecordingCluster(pods=(predecessor,))
    waiting = await run_pass(cluster, build_raw_job(status))

    assert list_create_requests(cluster) == []
    assert waiting.job["status"]["waiting"]["reason"] == "PredecessorTerminating"


async def test_a_pod_of_another_owner_does_not_delay_the_first_attempt() -> None:
    stranger = running_pod(job(), 1)
    stranger["metadata"]["ownerReferences"] = [{"kind": "ReplicaSet", "name": "bert", "uid": "x", "controller": True}]
    cluster = RecordingCluster(pods=(stranger,))
    await run_pass(cluster, STARTING_JOB)

    assert list_create_requests(cluster) == CREATES
