"""Adds to an observation what the pods of a job wait for as a group: a provider, or the quota of Kueue.

The objects are read only while pods wait, and not watched.
"""

from dataclasses import replace

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.scheduling import SchedulingProvider, SchedulingStatus
from finetune_api.v1alpha1.status import AttemptState
from finetune_operator import names
from finetune_operator.kube.cluster import Cluster, ClusterError, CreateRejected
from finetune_operator.observation.group_apis import GroupApis, find_group_apis
from finetune_operator.observation.ownership import RawBody
from finetune_operator.observation.pods import Observation
from finetune_operator.observation.workload import GATED, observe_workload
from finetune_operator.plan.pod_manifest import build_pod
from finetune_operator.plan.run_plan import plan_run
from finetune_operator.settings import Settings

GATE_IS_OFF = "is not enabled: the API server drops spec.schedulingGroup of pods (feature gate GenericWorkload)"


async def observe_group(
    cluster: Cluster, job: FineTuneJob, observation: Observation, settings: Settings
) -> Observation:
    """Add the providers of the cluster, or what the group of the current attempt waits for.

    Raises: ClusterError
    """
    scheduling, attempts = job.status.scheduling, job.status.attempts
    is_starting = bool(attempts) and attempts[-1].state is AttemptState.STARTING
    if job.spec.scheduling is None or not settings.on_cluster or not is_starting:
        return observation
    if scheduling is None:
        return replace(observation, group_apis=await discover_group_apis(cluster, job, settings))
    return await _observe_wait(cluster, job, observation, scheduling)


async def discover_group_apis(cluster: Cluster, job: FineTuneJob, settings: Settings) -> GroupApis:
    """Return the providers in the cluster. The API of PodGroups may be served while its feature gate is off.

    Raises: ClusterError
    """
    apis = find_group_apis(await cluster.list_api_versions())
    version = apis.versions.get(SchedulingProvider.POD_GROUP)
    is_candidate = job.spec.scheduling is not None and job.spec.scheduling.queue_name is None
    if version is None or not is_candidate:
        return apis
    problem = await _find_pod_group_problem(cluster, job, settings, version)
    return apis if problem is None else replace(apis, problems={SchedulingProvider.POD_GROUP: problem})


async def _find_pod_group_problem(cluster: Cluster, job: FineTuneJob, settings: Settings, version: str) -> str | None:
    """Create a pod of the job in a dry run, and return why it would not belong to its PodGroup."""
    scheduling = SchedulingStatus(provider=SchedulingProvider.POD_GROUP, api_version=version)
    status = job.status.model_copy(update={"scheduling": scheduling})
    job = job.model_copy(update={"status": status})
    run_plan = plan_run(job, attempt=status.attempts[-1].attempt, settings=settings)
    try:
        pod = await cluster.dry_run_create(build_pod(run_plan, run_plan.nodes[0]))
    except CreateRejected as error:
        return f"cannot be examined: a dry run of pod {error.name} is rejected: {error.message}"
    return None if (pod.get("spec") or {}).get("schedulingGroup") else GATE_IS_OFF


async def _observe_wait(
    cluster: Cluster, job: FineTuneJob, observation: Observation, scheduling: SchedulingStatus
) -> Observation:
    """Add the Workload of pods that wait for Kueue, and its position in the queue.

    The wait is shown without an explanation if the Workload does not exist yet.
    """
    nodes = observation.nodes_of_attempt(job.status.attempts[-1].attempt)
    is_gated = any(node.waiting and node.waiting.reason == GATED for node in nodes)
    if scheduling.provider != SchedulingProvider.KUEUE or not is_gated:
        return observation
    name, namespace = names.workload_name(job.metadata.name, job.metadata.uid), job.metadata.namespace
    workload = await _get_workload(cluster, namespace, name)
    if workload is None:
        return replace(observation, waits_for_queue=True)
    positions = await cluster.list_queue_positions(namespace, scheduling.queue_name or "")
    return replace(observation, waits_for_queue=True, workload=observe_workload(workload, positions))


async def _get_workload(cluster: Cluster, namespace: str, name: str) -> RawBody | None:
    """Return the Workload, or None if it does not exist or its API, which another project serves, does not respond."""
    try:
        return await cluster.get(names.WORKLOAD_KIND, namespace, name)
    except ClusterError:
        return None
