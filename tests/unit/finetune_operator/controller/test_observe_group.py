"""Tests of the discovery of providers, and of what a waiting group adds to an observation."""

from dataclasses import replace
from typing import Any

import pytest

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.scheduling import API_VERSIONS, SchedulingProvider, SchedulingStatus
from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, JobStatus
from finetune_operator.controller.observe_group import GATE_IS_OFF, discover_group_apis, observe_group
from finetune_operator.kube.cluster import ClusterError, CreateRejected
from finetune_operator.observation.pods import Observation
from finetune_operator.observation.workload import WorkloadObservation
from testing.builders.jobs import NOW, SETTINGS, RawBody, build_observation, job, pod
from testing.fakes.recording_cluster import RecordingCluster

POD_GROUP, VOLCANO = SchedulingProvider.POD_GROUP, SchedulingProvider.VOLCANO
KUEUE = SchedulingStatus(provider="Kueue", api_version="kueue.x-k8s.io/v1beta2", queue_name="gpus")
VERSIONS = ("apps/v1", "scheduling.k8s.io/v1beta1", "scheduling.k8s.io/v1alpha2", "scheduling.volcano.sh/v1beta1")
DISCOVERY, DRY_RUN = "list API versions", "dry run of Pod bert-3-0"
WORKLOAD_READ, POSITION_READ = "get Workload default/bert-11111111", "list positions in queue default/gpus"


def starting_job(
    *, state: AttemptState = AttemptState.STARTING, provider: SchedulingStatus | None = None, **scheduling: Any
) -> FineTuneJob:
    """Return a job whose attempt 3 has this state."""
    record = AttemptRecord(attempt=3, state=state, start_time=NOW)
    return job(status=JobStatus(attempts=(record,), scheduling=provider), scheduling=scheduling)


async def observe(cluster: RecordingCluster, owner: FineTuneJob, *pods: RawBody, **settings: Any) -> Observation:
    return await observe_group(cluster, owner, build_observation(owner, *pods), replace(SETTINGS, **settings))


def gated_pod(owner: FineTuneJob, node_rank: int) -> RawBody:
    condition = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
    return pod(owner, node_rank, attempt=3, conditions=[condition])


async def test_providers_are_discovered_once_the_attempt_starts() -> None:
    cluster = RecordingCluster(api_versions=VERSIONS)

    observation = await observe(cluster, starting_job())

    assert cluster.requests == [DISCOVERY, DRY_RUN]
    assert observation.group_apis is not None
    assert dict(observation.group_apis.versions) == {
        POD_GROUP: "scheduling.k8s.io/v1beta1",
        VOLCANO: "scheduling.volcano.sh/v1beta1",
    }
    assert observation.group_apis.problems == {}


@pytest.mark.parametrize(
    ("owner", "settings"),
    [
        pytest.param(job(), {}, id="no spec.scheduling"),
        pytest.param(job(scheduling={}), {}, id="no attempt"),
        pytest.param(starting_job(state=AttemptState.RUNNING), {}, id="running"),
        pytest.param(starting_job(state=AttemptState.STOPPING), {}, id="stopping"),
        pytest.param(starting_job(), {"on_cluster": False}, id="local mode"),
    ],
)
async def test_nothing_is_read_for_other_jobs(owner: FineTuneJob, settings: dict[str, Any]) -> None:
    cluster = RecordingCluster(api_versions=VERSIONS)

    observation = await observe(cluster, owner, **settings)

    assert cluster.requests == []
    assert observation == build_observation(owner)


async def test_dropped_field_means_that_the_feature_gate_is_off() -> None:
    """An API server with the gate off serves PodGroups, and drops the field of the pods without an error."""
    cluster = RecordingCluster(api_versions=VERSIONS, dropped_fields=frozenset({"schedulingGroup"}))

    apis = await discover_group_apis(cluster, starting_job(), SETTINGS)

    assert apis.problems == {POD_GROUP: GATE_IS_OFF}
    assert POD_GROUP in apis.versions


async def test_rejected_dry_run_is_reported_as_the_problem() -> None:
    rejection = CreateRejected("exceeded quota: gpus", status=403, kind="Pod", name="bert-3-0")
    cluster = RecordingCluster(api_versions=VERSIONS, errors={DRY_RUN: rejection})

    apis = await discover_group_apis(cluster, starting_job(), SETTINGS)

    assert apis.problems == {
        POD_GROUP: "cannot be examined: a dry run of pod bert-3-0 is rejected: exceeded quota: gpus"
    }


@pytest.mark.parametrize("line", [DISCOVERY, DRY_RUN])
async def test_unreachable_api_server_is_an_error(line: str) -> None:
    cluster = RecordingCluster(api_versions=VERSIONS, errors={line: ClusterError("timeout")})

    with pytest.raises(ClusterError):
        await discover_group_apis(cluster, starting_job(), SETTINGS)


@pytest.mark.parametrize(
    ("versions", "scheduling"),
    [
        pytest.param(VERSIONS, {"queueName": "gpus"}, id="a queue excludes PodGroup"),
        pytest.param(("apps/v1", "scheduling.volcano.sh/v1beta1"), {}, id="PodGroup is not served"),
    ],
)
async def test_no_pod_is_created_in_a_dry_run_without_need(versions: tuple[str, ...], scheduling: RawBody) -> None:
    cluster = RecordingCluster(api_versions=versions)

    apis = await discover_group_apis(cluster, starting_job(**scheduling), SETTINGS)

    assert cluster.requests == [DISCOVERY]
    assert VOLCANO in apis.versions


@pytest.mark.parametrize("version", API_VERSIONS[POD_GROUP])
async def test_gate_is_examined_with_the_served_version(version: str) -> None:
    apis = await discover_group_apis(RecordingCluster(api_versions=(version,)), starting_job(), SETTINGS)

    assert dict(apis.versions) == {POD_GROUP: version}
    assert apis.problems == {}


async def test_recorded_provider_is_not_discovered_again() -> None:
    volcano = SchedulingStatus(provider="Volcano", api_version="scheduling.volcano.sh/v1beta1")
    cluster, owner = RecordingCluster(api_versions=VERSIONS), starting_job(provider=volcano)

    observation = await observe(cluster, owner, pod(owner, 0, attempt=3))

    assert cluster.requests == []
    assert observation.group_apis is None


@pytest.mark.parametrize("exists", [True, False])
async def test_workload_of_gated_pods_is_read_with_its_position(exists: bool) -> None:
    workload = {"metadata": {"name": "bert-11111111"}}
    cluster = RecordingCluster(workloads={"bert-11111111": workload} if exists else {}, positions={"bert-11111111": 2})
    owner = starting_job(provider=KUEUE, queueName="gpus")

    observation = await observe(cluster, owner, gated_pod(owner, 0), gated_pod(owner, 1))

    assert cluster.requests == [WORKLOAD_READ, *([POSITION_READ] if exists else [])]
    assert observation.waits_for_queue
    assert observation.workload == (WorkloadObservation("", position=2) if exists else None)


async def test_workload_of_admitted_pods_is_not_read() -> None:
    cluster, owner = RecordingCluster(), starting_job(provider=KUEUE, queueName="gpus")

    await observe(cluster, owner, pod(owner, 0, attempt=3), pod(owner, 1, attempt=3))

    assert cluster.requests == []


async def test_wait_is_shown_without_an_explanation_if_the_workload_cannot_be_read() -> None:
    errors: dict[str, Exception] = {WORKLOAD_READ: ClusterError("forbidden")}
    owner = starting_job(provider=KUEUE, queueName="gpus")

    observation = await observe(RecordingCluster(errors=errors), owner, gated_pod(owner, 0))

    assert observation.workload is None
