"""Tests of the requests and the result of one reconcile pass."""

from datetime import timedelta

import pytest

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import AttemptState, JobStatus, Progress
from finetune_operator.controller.gather import CachedState
from finetune_operator.controller.reconcile import (
    MAX_REQUEUE_AFTER,
    PassDependencies,
    PassResult,
    reconcile,
    render_status,
)
from finetune_operator.core.write_delay import RUNNING_WRITE_INTERVAL
from finetune_operator.kube.cluster import ClusterError, Conflict, CreateRejected
from finetune_operator.observation.pods import RejectedCreate
from testing.builders.jobs import SETTINGS, UID, RawBody, finished_pod, job, pod, running_pod
from testing.builders.passes import (
    CREATES,
    LATER,
    LIST,
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

CREATED_PODS = {"bert-0-0": "pod-0-0", "bert-0-1": "pod-0-1"}
KILLED_PODS = (finished_pod(job(), 0, **KILLED), finished_pod(job(), 1, **KILLED))


async def test_the_status_is_written_before_any_action() -> None:
    cluster = RecordingCluster()
    result = await run_pass(cluster, STARTING_JOB, build_cached_state(*running_pods()))

    assert cluster.requests == ["write status", "event Running"]
    assert read_written_status(result).attempts[-1].state is AttemptState.RUNNING
    assert result.requeue_after == timedelta()  # requeued immediately, because no event triggers the next pass


def build_reporting_dependencies(cluster: RecordingCluster) -> tuple[PassDependencies, list[JobStatus]]:
    """Return dependencies, and the list to which passes with them append the reported statuses."""
    reported: list[JobStatus] = []
    return PassDependencies(cluster, SETTINGS, lambda: LATER, lambda _, status: reported.append(status)), reported


async def test_the_written_status_is_reported_although_an_action_fails() -> None:
    dependencies, reported = build_reporting_dependencies(RecordingCluster(errors={"event Running": ClusterError("x")}))
    with pytest.raises(ClusterError):
        await reconcile(dependencies, STARTING_JOB, build_cached_state(*running_pods()))

    assert [status.attempts[-1].state for status in reported] == [AttemptState.RUNNING]


async def test_a_status_that_could_not_be_written_is_not_reported() -> None:
    dependencies, reported = build_reporting_dependencies(RecordingCluster(errors={"write status": Conflict("x")}))
    with pytest.raises(Conflict):
        await reconcile(dependencies, STARTING_JOB, build_cached_state(*running_pods()))

    assert reported == []


async def test_the_failure_of_an_invalid_spec_is_reported() -> None:
    dependencies, reported = build_reporting_dependencies(RecordingCluster())
    await reconcile(dependencies, build_raw_job(sft=None, numNodes=0), CachedState())

    assert [status.completion_time for status in reported] == [LATER]


async def test_an_unchanged_status_is_not_written() -> None:
    cluster = RecordingCluster()
    status = compute_status_after_observations(running_pods())
    result = await run_pass(cluster, build_raw_job(status), build_cached_state(*running_pods()))

    assert cluster.requests == []
    assert result == PassResult(build_raw_job(status))


async def test_repeatedly_rejected_create_is_retried_after_a_delay() -> None:
    rejected_before = (RejectedCreate("Pod", "bert-0-1", 403, "exceeded quota"),)
    error = CreateRejected("exceeded quota", status=403, kind="Pod", name="bert-0-1")
    cluster = RecordingCluster(errors={CREATES[3]: error})
    first = await run_pass(cluster, STARTING_JOB, CachedState(rejected_creates=rejected_before))
    second = await run_pass(cluster, first.job, CachedState(rejected_creates=rejected_before))

    assert first.requeue_after == timedelta()  # requeued immediately, because the pending reason was written
    assert (second.rejected_creates, second.requeue_after) == (rejected_before, None)  # the backoff requeues it


@pytest.mark.parametrize(
    ("deadline", "requeue_after"), [(120, timedelta(seconds=60)), (360, MAX_REQUEUE_AFTER), (86_400, MAX_REQUEUE_AFTER)]
)
async def test_requeue_delay_is_limited_to_five_minutes(deadline: int, requeue_after: timedelta) -> None:
    status = compute_status_after_observations(running_pods(), running_pods(), activeDeadlineSeconds=deadline)
    job_body = build_raw_job(status, activeDeadlineSeconds=deadline)
    result = await run_pass(RecordingCluster(), job_body, build_cached_state(*running_pods()))

    assert result.requeue_after == requeue_after


@pytest.mark.parametrize(
    ("time_since_write", "is_written"),
    [
        pytest.param(RUNNING_WRITE_INTERVAL / 4, False, id="just written"),
        pytest.param(RUNNING_WRITE_INTERVAL, True, id="written an interval ago"),
        pytest.param(None, True, id="never written by this process"),
    ],
)
async def test_a_cosmetic_status_write_is_postponed(time_since_write: timedelta | None, is_written: bool) -> None:
    cluster, job_body = RecordingCluster(), RUNNING_JOB
    polled = Progress(step=5, update_time=LATER)
    result = await run_pass(
        cluster,
        job_body,
        build_cached_state(*running_pods(), progress=polled, time_since_status_write=time_since_write),
    )

    assert (cluster.requests == ["write status"]) is is_written
    if not is_written:
        assert result == PassResult(job_body, RUNNING_WRITE_INTERVAL * 3 / 4)


async def test_the_pass_that_ends_an_attempt_also_creates_the_next_one() -> None:
    stopping = compute_status_after_observations(running_pods(), KILLED_PODS)
    cluster = RecordingCluster(pods=KILLED_PODS)
    result = await run_pass(cluster, build_raw_job(stopping), build_cached_state(*KILLED_PODS))

    assert cluster.requests[:3] == [LIST, "write status", "create ConfigMap bert-1-11111111"]
    assert set(cluster.requests[3:]) == {
        "create Pod bert-1-0",
        "create Pod bert-1-1",
        "event ContainerKilled",
        "delete ConfigMap bert-0-11111111",
        *(f"delete Pod bert-0-{rank} pod-0-{rank} within 10 s" for rank in (0, 1)),
    }
    assert read_written_status(result).attempt == 1
    assert result.requeue_after is None  # the pods' events trigger the next pass


async def test_the_next_attempt_of_a_group_chooses_its_provider_in_a_pass_of_its_own() -> None:
    """If all pods have disappeared, no event triggers that pass."""
    group: dict[str, RawBody] = {"scheduling": {}}
    stopping = compute_status_after_observations(running_pods(), KILLED_PODS, **group)
    cluster = RecordingCluster(pods=KILLED_PODS)

    result = await run_pass(cluster, build_raw_job(stopping, **group), build_cached_state(*KILLED_PODS))

    assert read_written_status(result).attempt == 1
    assert not list_create_requests(cluster)
    assert result.requeue_after == timedelta()


async def test_a_status_write_that_changes_the_state_is_never_postponed() -> None:
    cluster = RecordingCluster()
    await run_pass(cluster, STARTING_JOB, build_cached_state(*running_pods(), time_since_status_write=timedelta()))

    assert cluster.requests[0] == "write status"


async def test_a_cosmetic_status_write_is_not_postponed_before_a_deletion() -> None:
    cluster, job_body = RecordingCluster(), RUNNING_JOB
    polled = Progress(step=5, update_time=LATER)
    other_pod = pod(job(), 0, attempt=1)
    await run_pass(
        cluster,
        job_body,
        build_cached_state(*running_pods(), other_pod, progress=polled, time_since_status_write=timedelta()),
    )

    assert cluster.requests == ["write status", "delete Pod bert-1-0 pod-1-0 within 10 s"]


async def test_an_attempt_does_not_run_before_all_created_pods_are_observed() -> None:
    cached = build_cached_state(running_pod(job(), 0), created_pods=CREATED_PODS, expected_pods=frozenset(CREATED_PODS))
    cluster = RecordingCluster()
    result = await run_pass(cluster, STARTING_JOB, cached)

    assert cluster.requests == ["write status"]
    [record] = read_written_status(result).attempts
    assert (record.state, record.created) == (AttemptState.STARTING, True)


async def test_a_created_pod_that_is_missing_ends_the_attempt_although_its_creation_is_not_recorded() -> None:
    status = compute_status_after_observations()
    cached = build_cached_state(running_pod(job(), 0), created_pods=CREATED_PODS)
    cluster = RecordingCluster(pods=(running_pod(job(), 0),))
    result = await run_pass(cluster, build_raw_job(status), cached)

    assert not status.attempts[-1].created
    [record] = read_written_status(result).attempts
    assert (record.state, record.created) == (AttemptState.STOPPING, True)


async def test_a_taken_service_name_fails_the_job_although_all_its_pods_were_created() -> None:
    taken = RejectedCreate("Service", "bert", 409, "exists", name_taken=True)
    pods = tuple(pod(job(), rank) for rank in (0, 1))
    cached = CachedState(pods=pods, created_pods=CREATED_PODS, rejected_creates=(taken,))
    result = await run_pass(RecordingCluster(pods=pods), STARTING_JOB, cached)

    [record] = read_written_status(result).attempts
    assert (record.state, record.reason) == (AttemptState.FAILED, Reason.NAME_TAKEN)


@pytest.mark.parametrize("is_outdated", [True, False])
async def test_a_pod_of_a_newer_attempt_is_deleted_only_if_the_job_is_not_outdated(is_outdated: bool) -> None:
    job_body = build_raw_job(compute_status_after_observations(running_pods(), running_pods()))
    version = str(int(job_body["metadata"]["resourceVersion"]) + is_outdated)
    cluster = RecordingCluster(
        jobs={"bert": {**job_body, "metadata": {**job_body["metadata"], "resourceVersion": version}}}
    )
    cached = build_cached_state(*running_pods(), pod(job(), 0, attempt=1))
    if is_outdated:
        with pytest.raises(Conflict):
            await run_pass(cluster, job_body, cached)
    else:
        await run_pass(cluster, job_body, cached)

    assert cluster.requests[0] == "get FineTuneJob default/bert"
    assert cluster.requests[1:] == ([] if is_outdated else ["delete Pod bert-1-0 pod-1-0 within 10 s"])


async def test_an_invalid_spec_fails_the_job_once_with_a_message() -> None:
    cluster = RecordingCluster()
    first = await run_pass(cluster, build_raw_job(numNodes=0))
    second = await run_pass(cluster, first.job)

    [status] = cluster.statuses
    assert status["phase"] == "Failed"
    [failed] = [condition for condition in status["conditions"] if condition["type"] == "Failed"]
    assert failed["reason"] == "InvalidSpec"
    assert failed["message"] == "spec.numNodes: must be greater than or equal to 1, found 0"
    assert second == PassResult(first.job)
    assert cluster.requests == ["write status", "event InvalidSpec"]


async def test_a_job_that_failed_with_an_invalid_spec_is_deleted_after_its_ttl() -> None:
    failed = await run_pass(RecordingCluster(), build_raw_job(numNodes=0, ttlSecondsAfterFinished=0))
    await run_pass(cluster := RecordingCluster(), failed.job)

    assert cluster.requests == [f"delete FineTuneJob bert {UID}"]


async def test_invalid_spec_does_not_fail_a_job_that_has_started() -> None:
    """Another version of the CRD and the operator may have accepted the value."""
    cluster = RecordingCluster()
    invalid_job = build_raw_job(compute_status_after_observations(running_pods()), numNodes=0)
    first = await run_pass(cluster, invalid_job, build_cached_state(*running_pods()))
    second = await run_pass(cluster, first.job, build_cached_state(*running_pods()))

    assert cluster.requests == ["write status"]
    assert first.job["status"]["attempts"] == invalid_job["status"]["attempts"]
    [stalled] = [condition for condition in first.job["status"]["conditions"] if condition["type"] == "Stalled"]
    assert stalled["reason"] == "ReconcileFailed"
    assert "spec.numNodes: must be greater than or equal to 1, found 0" in stalled["message"]
    assert second.job == first.job


async def test_repair_of_a_newer_release_stalls_the_job_without_an_error() -> None:
    cluster = RecordingCluster()
    body = build_raw_job(compute_status_after_observations(running_pods()))
    body["status"]["repair"] = {"deepspeed": "zero4"}
    result = await run_pass(cluster, body, build_cached_state(*running_pods()))

    assert cluster.requests == ["write status"]
    [stalled] = [condition for condition in result.job["status"]["conditions"] if condition["type"] == "Stalled"]
    assert "status.repair.deepspeed: unknown preset 'zero4'" in stalled["message"]


async def test_unknown_fields_of_a_newer_crd_are_ignored() -> None:
    cluster = RecordingCluster()
    status = compute_status_after_observations(running_pods())
    newer_job = build_raw_job(status, newField={"a": 1}, restartPolicy={"maxRestarts": 3, "newKnob": True})
    older_job = build_raw_job(status, restartPolicy={"maxRestarts": 3})
    result = await run_pass(cluster, newer_job, build_cached_state(*running_pods()))

    assert cluster.requests == []
    assert (
        result.requeue_after
        == (await run_pass(RecordingCluster(), older_job, build_cached_state(*running_pods()))).requeue_after
    )


async def test_job_with_unparsable_status_is_not_changed() -> None:
    cluster = RecordingCluster()
    status = {"attempts": [{"attempt": 0, "state": "Evaluating"}]}
    with pytest.raises(
        ClusterError, match=r"status cannot be read, the job is left alone: status.attempts\[0\].state: "
    ):
        await run_pass(cluster, {**build_raw_job(), "status": status}, build_cached_state(*running_pods()))

    assert cluster.requests == []


async def test_fields_and_values_of_a_newer_release_do_not_stop_a_job() -> None:
    status = render_status(compute_status_after_observations())
    status |= {"phase": "Evaluating", "fieldOfANewerRelease": {"a": 1}}
    status["attempts"][-1]["fault"] = "cosmicRays"

    result = await run_pass(
        RecordingCluster(), {**build_raw_job(), "status": status}, build_cached_state(*running_pods())
    )

    assert result.job["status"]["fieldOfANewerRelease"] == {"a": 1}
    assert read_written_status(result).phase == "Running"


def test_empty_status_fields_are_omitted_except_restarts() -> None:
    assert render_status(JobStatus()) == {"restarts": 0}


def test_rendered_status_is_parsed_without_loss() -> None:
    status = compute_status_after_observations(running_pods())
    assert FineTuneJob.parse(build_raw_job(status)).status == status
