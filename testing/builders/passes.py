"""Builders for reconcile passes over the two-node job `bert` with a recording cluster."""

from datetime import timedelta
from typing import Any

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.status import JobStatus
from finetune_operator import names
from finetune_operator.controller.gather import CachedState
from finetune_operator.controller.reconcile import PassDependencies, PassResult, reconcile, render_status
from finetune_operator.plan.manifests import build_service
from finetune_operator.plan.run_plan import plan_run
from testing.builders.jobs import NOW, SETTINGS, UID, RawBody, build_observation, decide_once, job, running_pod, spec
from testing.fakes.recording_cluster import RecordingCluster

EMPTY_CACHE = CachedState()
LATER = NOW + timedelta(minutes=1)
LIST = f"list pods of default with {names.JOB_UID}={UID}"
LIST_BY_NAME = f"list pods of default with {names.JOB_NAME}=bert"  # at the first attempt
CLAIMS = ["get PersistentVolumeClaim default/models", "get PersistentVolumeClaim default/datasets"]
CREATES = ["create Service bert", "create ConfigMap bert-0-11111111", "create Pod bert-0-0", "create Pod bert-0-1"]


def build_raw_job(status: JobStatus | None = None, **fields: Any) -> RawBody:
    """Return the raw body of the job."""
    metadata = {"name": "bert", "namespace": "default", "uid": UID, "generation": 1, "resourceVersion": "7"}
    job_body: RawBody = {"metadata": metadata, "spec": spec(**fields)}
    return job_body if status is None else {**job_body, "status": render_status(status)}


def compute_status_after_observations(*observed_pods: tuple[RawBody, ...], **fields: Any) -> JobStatus:
    """Return the status after a first decision without pods and one decision per set of observed pods."""
    current_job = job(**fields)
    for pods in ((), *observed_pods):
        current_job, _ = decide_once(current_job, build_observation(current_job, *pods))
    return current_job.status


def running_pods() -> tuple[RawBody, ...]:
    """Return the running pods of both nodes."""
    return running_pod(job(), 0), running_pod(job(), 1)


STARTING_JOB = build_raw_job(compute_status_after_observations())
RUNNING_JOB = build_raw_job(compute_status_after_observations(running_pods()))


def build_cached_state(*pods: RawBody, **fields: Any) -> CachedState:
    """Return a cached state with these pods and the Service."""
    return CachedState(pods=pods, services=(build_service(plan_run(job(), attempt=0, settings=SETTINGS)),), **fields)


async def run_pass(cluster: RecordingCluster, job_body: RawBody, cached: CachedState = EMPTY_CACHE) -> PassResult:
    """Run one reconcile pass one minute after NOW."""
    return await reconcile(PassDependencies(cluster, SETTINGS, lambda: LATER), job_body, cached)


def list_create_requests(cluster: RecordingCluster) -> list[str]:
    """Return the create requests in order."""
    return [line for line in cluster.requests if line.startswith("create")]


def read_written_status(pass_result: PassResult) -> JobStatus:
    """Return the job status that the pass has written."""
    return FineTuneJob.parse(pass_result.job).status
