"""Tests of one reconcile pass: its requests to the cluster, their order, and its result."""

import contextlib
from datetime import timedelta
from typing import Any

import pytest

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.status import AttemptState, JobStatus, Progress
from finetune_operator.controller.reconcile import (
    MAX_REQUEUE_AFTER,
    STATUS_WRITE_INTERVAL,
    CachedState,
    PassDependencies,
    PassResult,
    build_event,
    reconcile,
    render_status,
)
from finetune_operator.core.actions import Emit
from finetune_operator.kube.cluster import ClusterError, Conflict, CreateRejected, NameTaken
from finetune_operator.observation.pods import RejectedCreate
from finetune_operator.plan.manifests import build_service
from finetune_operator.plan.run_plan import plan_run
from testing.builders.jobs import (
    NOW,
    SETTINGS,
    UID,
    RawBody,
    decide_once,
    ended_pod,
    job,
    observation_of,
    pod,
    running_pod,
    spec,
    terminating_pod,
)
from testing.fakes.recording_cluster import RecordingCluster

EMPTY_CACHE = CachedState()
LATER = NOW + timedelta(minutes=1)
LIST = f"list pods of default/{UID}"
CLAIMS = ["get PersistentVolumeClaim default/models", "get PersistentVolumeClaim default/datasets"]
CREATES = ["create Service bert", "create ConfigMap bert-0", "create Pod bert-0-0", "create Pod bert-0-1"]


def body(status: JobStatus | None = None, **fields: Any) -> RawBody:
    """Return the job as the API server returns it."""
    metadata = {"name": "bert", "namespace": "default", "uid": UID, "generation": 1, "resourceVersion": "7"}
    job_body: RawBody = {"metadata": metadata, "spec": spec(**fields)}
    return job_body if status is None else {**job_body, "status": render_status(status)}


def status_after(*observed_pods: tuple[RawBody, ...], **fields: Any) -> JobStatus:
    """Return the status after a first decision without pods, and one more for each of these sets of pods."""
    current_job = job(**fields)
    for pods in ((), *observed_pods):
        current_job, _ = decide_once(current_job, observation_of(current_job, *pods))
    return current_job.status


def running_pods() -> tuple[RawBody, ...]:
    return running_pod(job(), 0), running_pod(job(), 1)


def cached_state(*pods: RawBody, **fields: Any) -> CachedState:
    return CachedState(pods=pods, services=(build_service(plan_run(job(), attempt=0, settings=SETTINGS)),), **fields)


async def run_pass(cluster: RecordingCluster, job_body: RawBody, cached: CachedState = EMPTY_CACHE) -> PassResult:
    return await reconcile(PassDependencies(cluster, SETTINGS, lambda: LATER), job_body, cached)


def create_requests(cluster: RecordingCluster) -> list[str]:
    return [line for line in cluster.requests if line.startswith("create")]


def written_status(result: PassResult) -> JobStatus:
    return FineTuneJob.parse(result.job).status


async def test_the_status_is_written_before_any_action() -> None:
    cluster = RecordingCluster()
    result = await run_pass(cluster, body(status_after()), cached_state(*running_pods()))

    assert cluster.requests == ["write status", "event Running"]
    assert written_status(result).attempts[-1].state is AttemptState.RUNNING
    assert result.requeue_after == timedelta()  # the next step waits for no event


async def test_a_conflict_ends_the_pass_before_any_action() -> None:
    cluster = RecordingCluster(errors={"write status": Conflict("changed")})
    with pytest.raises(Conflict):
        await run_pass(cluster, body(status_after()), cached_state(*running_pods()))

    assert cluster.requests == ["write status"]


async def test_an_unchanged_status_is_not_written() -> None:
    cluster = RecordingCluster()
    status = status_after(running_pods())
    result = await run_pass(cluster, body(status), cached_state(*running_pods()))

    assert cluster.requests == []
    assert result == PassResult(body(status))


async def test_only_pods_that_the_list_lacks_are_read_by_name() -> None:
    unlabelled_pod = running_pod(job(), 1)
    unlabelled_pod["metadata"]["labels"] = {}
    cluster = RecordingCluster(pods=(running_pod(job(), 0),), unlisted_pods={"bert-0-1": unlabelled_pod})
    result = await run_pass(cluster, body(status_after(running_pods())), cached_state(running_pod(job(), 0)))

    assert cluster.requests == [LIST, "get Pod default/bert-0-1", "write status"]
    assert written_status(result).attempts[-1].evidence[1].deleted

    cluster.pods = ()
    result = await run_pass(cluster, result.job, cached_state(deleted_pods=(terminating_pod(ended_pod(job(), 0)),)))
    requests = ["write status", "delete Pod bert-0-1 pod-0-1 within 120 s"]
    assert cluster.requests[3:] == [LIST, "get Pod default/bert-0-1", *requests]


async def test_a_pod_with_the_labels_of_the_job_but_another_owner_is_ignored() -> None:
    foreign_pod = running_pod(job(), 1)
    foreign_pod["metadata"]["ownerReferences"][0]["uid"] = "another"
    cluster = RecordingCluster(pods=(running_pod(job(), 0), foreign_pod))
    result = await run_pass(
        cluster, body(status_after(running_pods())), cached_state(running_pod(job(), 0), foreign_pod)
    )

    assert written_status(result).attempts[-1].state is AttemptState.STOPPING


async def test_children_are_created_only_after_uncached_reads() -> None:
    cluster = RecordingCluster()
    await run_pass(cluster, body(status_after()))

    assert sorted(cluster.requests[:3]) == sorted([*CLAIMS, LIST])
    assert cluster.requests[3:] == CREATES


async def test_a_pod_that_only_the_list_contains_is_not_created_again() -> None:
    cluster = RecordingCluster(pods=(pod(job(), 0),))
    await run_pass(cluster, body(status_after()))

    assert create_requests(cluster) == [line for line in CREATES if line != "create Pod bert-0-0"]


async def test_a_pod_missing_in_the_cache_but_listed_counts_as_running() -> None:
    cluster = RecordingCluster(pods=running_pods())
    result = await run_pass(cluster, body(status_after(running_pods())), cached_state(running_pod(job(), 0)))

    assert cluster.requests == [LIST]  # claims are read only before the attempt has started
    assert result.requeue_after is None


async def test_a_pod_that_only_the_cache_contains_counts_as_deleted_and_is_not_created_again() -> None:
    cluster = RecordingCluster(pods=())
    result = await run_pass(cluster, body(status_after()), cached_state(pod(job(), 0)))

    assert create_requests(cluster) == []
    assert written_status(result).attempts[-1].evidence[0].deleted


async def test_claims_are_checked_before_pods_are_created() -> None:
    cluster = RecordingCluster(access_modes={"models": ["ReadWriteOnce"]})
    result = await run_pass(cluster, body(status_after()))

    assert written_status(result).attempts[-1].reason == "InvalidSpec"
    assert create_requests(cluster) == []


async def test_all_actions_are_executed_before_an_error_is_raised() -> None:
    cluster = RecordingCluster(errors={line: ClusterError("timeout") for line in CREATES[2:]})
    with pytest.raises(ClusterError, match="timeout"):
        await run_pass(cluster, body(status_after()))

    assert create_requests(cluster) == CREATES


@pytest.mark.parametrize("error", [ClusterError("timeout"), NameTaken(kind="ConfigMap", name="bert-0")])
async def test_no_pod_is_created_without_the_config_map_that_it_mounts(error: Exception) -> None:
    cluster = RecordingCluster(errors={CREATES[1]: error})
    with contextlib.suppress(ClusterError):
        await run_pass(cluster, body(status_after()))

    assert create_requests(cluster) == CREATES[:2]


async def test_new_rejected_creates_are_returned_and_requeue_the_job_at_once() -> None:
    error = CreateRejected("exceeded quota", status=403, kind="Pod", name="bert-0-1")
    cluster = RecordingCluster(
        errors={
            CREATES[0]: NameTaken(kind="Service", name="bert"),
            CREATES[2]: NameTaken(kind="Pod", name="bert-0-0", predecessor_terminating=True),
            CREATES[3]: error,
        }
    )
    result = await run_pass(cluster, body(status_after()))

    taken, predecessor, quota = result.rejected_creates
    assert (taken.kind, taken.name, taken.name_taken, taken.predecessor_terminating) == ("Service", "bert", True, False)
    assert (predecessor.kind, predecessor.name) == ("Pod", "bert-0-0")
    assert (predecessor.name_taken, predecessor.predecessor_terminating) == (False, True)
    assert quota == RejectedCreate("Pod", "bert-0-1", 403, "exceeded quota")
    assert result.requeue_after == timedelta()


async def test_a_known_rejected_create_is_retried_after_a_delay() -> None:
    rejected_before = (RejectedCreate("Pod", "bert-0-1", 403, "exceeded quota"),)
    error = CreateRejected("exceeded quota", status=403, kind="Pod", name="bert-0-1")
    cluster = RecordingCluster(errors={CREATES[3]: error})
    first = await run_pass(cluster, body(status_after()), CachedState(rejected_creates=rejected_before))
    second = await run_pass(cluster, first.job, CachedState(rejected_creates=rejected_before))

    assert first.requeue_after == timedelta()  # the pending reason was written
    assert (second.rejected_creates, second.requeue_after) == (rejected_before, timedelta(seconds=1))


@pytest.mark.parametrize(
    ("deadline", "requeue_after"), [(120, timedelta(seconds=60)), (360, MAX_REQUEUE_AFTER), (86_400, MAX_REQUEUE_AFTER)]
)
async def test_the_requeue_delay_is_limited_so_that_a_corrected_clock_takes_effect(
    deadline: int, requeue_after: timedelta
) -> None:
    status = status_after(running_pods(), running_pods(), activeDeadlineSeconds=deadline)
    job_body = body(status, activeDeadlineSeconds=deadline)
    result = await run_pass(RecordingCluster(), job_body, cached_state(*running_pods()))

    assert result.requeue_after == requeue_after


@pytest.mark.parametrize(
    ("since_status_write", "written"),
    [
        pytest.param(STATUS_WRITE_INTERVAL / 4, False, id="just written"),
        pytest.param(STATUS_WRITE_INTERVAL, True, id="written an interval ago"),
        pytest.param(None, True, id="never written by this process"),
    ],
)
async def test_a_cosmetic_status_write_is_postponed(since_status_write: timedelta | None, written: bool) -> None:
    cluster, job_body = RecordingCluster(), body(status_after(running_pods()))
    polled = Progress(step=5, update_time=LATER)
    result = await run_pass(
        cluster, job_body, cached_state(*running_pods(), progress=polled, since_status_write=since_status_write)
    )

    assert (cluster.requests == ["write status"]) is written
    if not written:
        assert result == PassResult(job_body, STATUS_WRITE_INTERVAL * 3 / 4)


async def test_a_status_write_that_changes_the_state_is_never_postponed() -> None:
    cluster = RecordingCluster()
    await run_pass(cluster, body(status_after()), cached_state(*running_pods(), since_status_write=timedelta()))

    assert cluster.requests[0] == "write status"


async def test_progress_of_an_earlier_attempt_is_ignored() -> None:
    cluster = RecordingCluster()
    stale = Progress(step=5, update_time=NOW - timedelta(seconds=1))
    await run_pass(cluster, body(status_after(running_pods())), cached_state(*running_pods(), progress=stale))

    assert cluster.requests == []


async def test_a_foreign_service_does_not_count_as_the_service_of_the_job() -> None:
    foreign = {"metadata": {"name": "bert", "ownerReferences": [{"uid": "another", "controller": True}]}}
    cluster = RecordingCluster(pods=running_pods())
    await run_pass(cluster, body(status_after()), CachedState(pods=running_pods(), services=(foreign,)))

    assert "create Service bert" in cluster.requests


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param({"selector": {"app": "theirs"}}, id="other selector"),
        pytest.param({"publishNotReadyAddresses": False}, id="no DNS names before readiness"),
        pytest.param({"type": "ExternalName", "externalName": "example.com", "clusterIP": ""}, id="other type"),
    ],
)
async def test_an_edited_service_is_deleted_and_an_intact_one_is_not(edit: RawBody) -> None:
    service = build_service(plan_run(job(), attempt=0, settings=SETTINGS))
    metadata = {**service["metadata"], "uid": "uid-9"}
    intact = {"metadata": metadata, "spec": {**service["spec"], "type": "ClusterIP", "sessionAffinity": "None"}}
    edited = {"metadata": metadata, "spec": {**service["spec"], **edit}}
    job_body = body(status_after(running_pods()))
    for existing, requests in ((intact, []), (edited, ["delete Service bert uid-9"])):
        cluster = RecordingCluster(pods=running_pods())
        await run_pass(cluster, job_body, CachedState(pods=running_pods(), services=(existing,)))
        assert cluster.requests == requests


async def test_an_invalid_spec_fails_the_job_once_with_a_message() -> None:
    cluster = RecordingCluster()
    first = await run_pass(cluster, body(numNodes=0))
    second = await run_pass(cluster, first.job)

    [status] = cluster.statuses
    assert status["phase"] == "Failed"
    [failed] = [condition for condition in status["conditions"] if condition["type"] == "Failed"]
    assert failed["reason"] == "InvalidSpec"
    assert failed["message"] == "spec.numNodes: must be greater than or equal to 1, found 0"
    assert second == PassResult(first.job)
    assert cluster.requests == ["write status", "event InvalidSpec"]


async def test_a_spec_that_became_invalid_stops_the_running_pods() -> None:
    cluster = RecordingCluster()
    broken = body(status_after(running_pods()), numNodes=0)
    first = await run_pass(cluster, broken, cached_state(*running_pods()))
    deletions = ["delete Pod bert-0-0 pod-0-0 within 10 s", "delete Pod bert-0-1 pod-0-1 within 10 s"]

    assert cluster.requests == ["write status", *deletions, "event InvalidSpec"]
    assert first.job["status"]["attempts"][-1]["state"] == "Failed"

    second_cluster = RecordingCluster()  # as if the operator had crashed before it sent the deletions
    await run_pass(second_cluster, first.job, cached_state(*running_pods()))
    assert second_cluster.requests == deletions


async def test_a_job_whose_status_cannot_be_parsed_is_left_alone() -> None:
    cluster = RecordingCluster()
    with pytest.raises(ClusterError, match=r"status cannot be read, the job is left alone: status.phase: "):
        await run_pass(cluster, {**body(), "status": {"phase": "Evaluating"}}, cached_state(*running_pods()))

    assert cluster.requests == []


async def test_pods_are_deleted_by_uid_with_their_grace_period() -> None:
    status = status_after(running_pods(), (running_pod(job(), 0), ended_pod(job(), 1)))
    assert status.attempts[-1].state is AttemptState.STOPPING
    cluster = RecordingCluster()
    await run_pass(cluster, body(status), cached_state(running_pod(job(), 0), ended_pod(job(), 1)))

    assert cluster.requests == ["delete Pod bert-0-0 pod-0-0 within 10 s"]


async def test_a_job_is_deleted_by_uid_after_its_ttl() -> None:
    status = status_after().model_copy(update={"completion_time": NOW})
    cluster = RecordingCluster()
    await run_pass(cluster, body(status, ttlSecondsAfterFinished=60))

    assert cluster.requests == [f"delete FineTuneJob bert {UID}"]


async def test_a_new_attempt_deletes_the_config_map_of_the_previous_one() -> None:
    [record] = status_after().attempts
    status = status_after().model_copy(update={"attempt": 1, "attempts": (record.model_copy(update={"attempt": 1}),)})
    cluster = RecordingCluster()
    await run_pass(cluster, body(status), cached_state())

    assert "delete ConfigMap bert-0" in cluster.requests


def test_events_with_the_same_key_have_the_same_name() -> None:
    emit = Emit("Warning", "RankKilled", "rank 3 was ended by SIGKILL", "failed-0")
    event = build_event(job().metadata, emit, NOW)
    repeated = build_event(job().metadata, Emit("Warning", "RankKilled", "another message", "failed-0"), LATER)
    other = build_event(job().metadata, Emit("Warning", "RankKilled", "rank 3 was ended by SIGKILL", "failed-1"), NOW)

    assert event["metadata"]["name"] == repeated["metadata"]["name"] != other["metadata"]["name"]
    assert (event["involvedObject"]["kind"], event["involvedObject"]["uid"]) == ("FineTuneJob", UID)
    assert (event["type"], event["reason"], event["firstTimestamp"]) == (
        "Warning",
        "RankKilled",
        "2026-01-01T12:00:00Z",
    )


def test_the_message_of_an_event_is_truncated_to_the_limit_of_the_api_server() -> None:
    event = build_event(job().metadata, Emit("Normal", "Running", "x" * 5000, "running-0"), NOW)
    assert len(event["message"]) == 1024


def test_empty_fields_of_the_status_are_omitted_except_restarts() -> None:
    assert render_status(JobStatus()) == {"restarts": 0}


def test_a_rendered_status_is_parsed_to_the_same_status() -> None:
    status = status_after(running_pods())
    assert FineTuneJob.parse(body(status)).status == status
