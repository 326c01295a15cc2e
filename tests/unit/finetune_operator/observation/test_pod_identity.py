"""Tests of the distinction between pods of the operator and copies of them."""

import pytest

from finetune_api.v1alpha1.status import AttemptRecord, AttemptState
from finetune_operator import names
from finetune_operator.controller.gather import CachedState, observe_cached
from finetune_operator.controller.job_cache import JobCache, get_job_key
from finetune_operator.core.decide import decide
from finetune_operator.kube.cluster import KubernetesCluster, NameTaken
from finetune_operator.observation.pods import Observation
from finetune_operator.plan.manifests import build_children
from finetune_operator.plan.run_plan import plan_run
from testing.builders.jobs import NOW, SETTINGS, RawBody, job, running_pod
from testing.builders.passes import build_raw_job
from testing.fakes.api_client import serve_and_connect
from testing.fakes.http_api import HttpApi

STARTED = job(status=decide(job(), Observation(), NOW, SETTINGS).status)
START_KEY = STARTED.status.attempts[-1].start_key


def own_pod(node_rank: int = 0, *, uid: str = "aaaaaaaa-1", start_key: str = START_KEY, name: str = "") -> RawBody:
    body = running_pod(job(), node_rank if node_rank < 2 else 0)
    annotations = {names.START_KEY: start_key} if start_key else {}
    metadata = {"name": name or f"bert-0-{node_rank}", "uid": uid, "annotations": annotations}
    return {**body, "metadata": {**body["metadata"], **metadata}}


def test_each_attempt_has_another_key_which_its_pods_get() -> None:
    later = decide(job(), Observation(), NOW.replace(microsecond=1), SETTINGS).status.attempts[-1]
    assert len({START_KEY, later.start_key, ""}) == 3
    pods = [
        child for child in build_children(plan_run(STARTED, attempt=0, settings=SETTINGS)) if child["kind"] == "Pod"
    ]
    assert [pod["metadata"]["annotations"][names.START_KEY] for pod in pods] == [START_KEY] * 2


@pytest.mark.parametrize(
    ("record", "pod", "is_own"),
    [
        pytest.param({"start_key": "k"}, own_pod(start_key="k"), True, id="key"),
        pytest.param({"start_key": "k"}, own_pod(start_key="other"), False, id="other key"),
        pytest.param({"start_key": "k"}, own_pod(start_key=""), False, id="no key"),
        pytest.param({"start_key": "k", "pod_uids": "aaaaaaaabbbbbbbb"}, own_pod(start_key="k"), True, id="uid"),
        pytest.param({"start_key": "k", "pod_uids": "bbbbbbbbaaaaaaaa"}, own_pod(start_key="k"), False, id="other uid"),
        pytest.param({}, own_pod(start_key=""), True, id="of an older release"),
        pytest.param({}, own_pod(7, start_key=""), False, id="rank beyond the attempt"),
    ],
)
def test_a_pod_is_observed_only_if_the_operator_created_it(record: dict[str, str], pod: RawBody, is_own: bool) -> None:
    attempt = AttemptRecord(attempt=0, state=AttemptState.STARTING, num_nodes=2).model_copy(update=record)
    ftjob = job(status=STARTED.status.model_copy(update={"attempt": 0, "attempts": (attempt,)}))

    assert bool(observe_cached(ftjob, CachedState(pods=(pod,))).nodes) is is_own
    raw_job, jobs = build_raw_job(ftjob.status), JobCache()
    jobs.store_if_newer(raw_job)
    assert jobs.is_current_pod(get_job_key(raw_job), pod) is is_own


async def test_an_existing_pod_is_adopted_only_with_the_key(api: HttpApi) -> None:
    manifest = next(
        child for child in build_children(plan_run(STARTED, attempt=0, settings=SETTINGS)) if child["kind"] == "Pod"
    )
    async with serve_and_connect(api) as client:
        cluster = KubernetesCluster(client)
        uid = await cluster.create(manifest)
        assert await cluster.create(manifest) == uid, "the response to the first request was lost"
        forged = {**manifest["metadata"], "annotations": {names.START_KEY: "guessed"}}
        api.put("pods", {**manifest, "metadata": forged})
        with pytest.raises(NameTaken, match="bert-0-0"):
            await cluster.create(manifest)
