"""Tests of the API requests that execute the actions of a decision."""

import asyncio
import contextlib
from datetime import timedelta

import pytest

from finetune_api.v1alpha1.status import AttemptState
from finetune_operator import names
from finetune_operator.controller import execute_actions
from finetune_operator.controller.execute_actions import MAX_CONCURRENT_POD_CREATES
from finetune_operator.core.actions import Create, DeletePodGroup
from finetune_operator.kube.cluster import ClusterError, CreateRejected, NameTaken
from testing.builders.jobs import (
    NOW,
    UID,
    RawBody,
    finished_pod,
    job,
    running_pod,
)
from testing.builders.passes import (
    CREATES,
    STARTING_JOB,
    build_cached_state,
    build_raw_job,
    compute_status_after_observations,
    list_create_requests,
    run_pass,
    running_pods,
)
from testing.builders.stopping import KILLED
from testing.fakes.recording_cluster import RecordingCluster


async def test_all_actions_are_executed_before_an_error_is_raised() -> None:
    cluster = RecordingCluster(errors={line: ClusterError("timeout") for line in CREATES[2:]})
    with pytest.raises(ClusterError, match="timeout"):
        await run_pass(cluster, STARTING_JOB)

    assert list_create_requests(cluster) == CREATES


@pytest.mark.parametrize("error", [ClusterError("timeout"), NameTaken(kind="ConfigMap", name="bert-0")])
async def test_no_pod_is_created_if_its_config_map_is_missing(error: Exception) -> None:
    cluster = RecordingCluster(errors={CREATES[1]: error})
    with contextlib.suppress(ClusterError):
        await run_pass(cluster, STARTING_JOB)

    assert list_create_requests(cluster) == CREATES[:2]


async def test_no_pod_is_created_before_an_old_pod_group_is_deleted() -> None:
    """No later pass would delete it, because none creates pods."""
    kind = f"scheduling.k8s.io/v1beta1/{names.POD_GROUP_KIND}"
    cluster = RecordingCluster(errors={f"delete {kind} bert-0": ClusterError("timeout")})
    actions = (
        Create({"kind": "Pod", "metadata": {"name": "bert-1-0"}}),
        DeletePodGroup("bert-0", kind.rpartition("/")[0]),
    )
    with pytest.raises(ClusterError, match="timeout"):
        await execute_actions.execute_actions(cluster, job().metadata, actions, now=NOW)

    assert cluster.requests == [f"delete {kind} bert-0"]


async def test_new_rejected_creates_are_returned_and_requeue_the_job_immediately() -> None:
    """After a rejected create, no further object of this kind is created, and no pod without its Service."""
    predecessor = NameTaken(kind="Pod", name="bert-0-0", predecessor_terminating=True)
    rejected: dict[str, tuple[ClusterError, list[str]]] = {
        CREATES[0]: (NameTaken(kind="Service", name="bert"), ["ConfigMap"]),
        CREATES[2]: (predecessor, ["Service", "ConfigMap"]),
        CREATES[3]: (
            CreateRejected("exceeded quota", status=403, kind="Pod", name="bert-0-1"),
            ["Service", "ConfigMap", "Pod"],
        ),
    }
    for request, (error, created) in rejected.items():
        cluster = RecordingCluster(errors={request: error})
        result = await run_pass(cluster, STARTING_JOB)

        [rejection] = result.rejected_creates
        assert rejection.message in str(error)
        assert rejection.predecessor_terminating is getattr(error, "predecessor_terminating", False)
        assert rejection.name_taken is (request == CREATES[0])
        executed = [action.manifest["kind"] for action in result.actions if isinstance(action, Create)]
        assert executed == created
        assert len(list_create_requests(cluster)) == len(created) + 1
        assert result.requeue_after == timedelta()


async def test_pods_are_deleted_by_uid_with_their_grace_period() -> None:
    status = compute_status_after_observations(running_pods(), (running_pod(job(), 0), finished_pod(job(), 1)))
    assert status.attempts[-1].state is AttemptState.STOPPING
    cluster = RecordingCluster()
    await run_pass(cluster, build_raw_job(status), build_cached_state(running_pod(job(), 0), finished_pod(job(), 1)))

    assert cluster.requests == ["delete Pod bert-0-0 pod-0-0 within 10 s"]


@pytest.mark.parametrize(
    ("sent_grace_seconds", "is_deleted_again"),
    [pytest.param(10, False, id="same grace period"), pytest.param(120, True, id="longer grace period")],
)
async def test_pod_is_not_deleted_again_before_the_event_of_its_deletion(
    sent_grace_seconds: int, is_deleted_again: bool
) -> None:
    pods = (running_pod(job(), 0), finished_pod(job(), 1))
    status = compute_status_after_observations(running_pods(), pods)
    cluster = RecordingCluster()
    cached = build_cached_state(*pods, sent_deletions={"pod-0-0": sent_grace_seconds})
    await run_pass(cluster, build_raw_job(status), cached)

    assert (cluster.requests == ["delete Pod bert-0-0 pod-0-0 within 10 s"]) is is_deleted_again


async def test_next_attempt_deletes_the_config_map_of_the_previous_attempt() -> None:
    [record] = compute_status_after_observations().attempts
    status = compute_status_after_observations().model_copy(
        update={"attempt": 1, "attempts": (record.model_copy(update={"attempt": 1}),)}
    )
    cluster = RecordingCluster()
    await run_pass(cluster, build_raw_job(status), build_cached_state())

    assert f"delete ConfigMap {names.config_map_name('bert', UID, 0)}" in cluster.requests


async def test_events_and_deletions_do_not_delay_the_pods_of_the_next_attempt() -> None:
    class ClusterWithoutEventResponses(RecordingCluster):
        async def emit_event(self, event: RawBody) -> None:
            while list_create_requests(self)[-1:] != ["create Pod bert-1-1"]:  # noqa: ASYNC110
                await asyncio.sleep(0)
            await super().emit_event(event)

    killed_pods = (finished_pod(job(), 0, **KILLED), finished_pod(job(), 1, **KILLED))
    status = compute_status_after_observations(running_pods(), killed_pods)
    cluster = ClusterWithoutEventResponses(pods=killed_pods)
    async with asyncio.timeout(10):  # only reached if the test fails
        await run_pass(cluster, build_raw_job(status), build_cached_state(*killed_pods))

    assert "event ContainerKilled" in cluster.requests


class SlowCluster(RecordingCluster):
    """Cluster whose creates of pods take some time each."""

    create_seconds = 0.01
    open_creates = 0
    most_open_creates = 0

    async def create(self, manifest: RawBody) -> str:
        uid = await super().create(manifest)
        if manifest["kind"] == "Pod":
            self.open_creates += 1
            self.most_open_creates = max(self.most_open_creates, self.open_creates)
            await asyncio.sleep(self.create_seconds)
            self.open_creates -= 1
        return uid


async def test_a_job_has_a_limited_number_of_creates_in_flight() -> None:
    cluster = SlowCluster()
    nodes = 3 * MAX_CONCURRENT_POD_CREATES
    await run_pass(cluster, build_raw_job(compute_status_after_observations(numNodes=nodes), numNodes=nodes))

    assert cluster.most_open_creates == MAX_CONCURRENT_POD_CREATES
    assert len(list_create_requests(cluster)) == nodes + 2


async def test_a_pass_ends_although_creates_are_slow_and_the_next_pass_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(execute_actions, "POD_CREATE_SECONDS", 0.4)
    monkeypatch.setattr(SlowCluster, "create_seconds", 0.5)
    cluster, nodes = SlowCluster(), 3 * MAX_CONCURRENT_POD_CREATES
    with pytest.raises(ClusterError, match=f"{nodes - MAX_CONCURRENT_POD_CREATES} of {nodes} pods are created later"):
        await run_pass(cluster, build_raw_job(compute_status_after_observations(numNodes=nodes), numNodes=nodes))

    assert len(list_create_requests(cluster)) == MAX_CONCURRENT_POD_CREATES + 2
