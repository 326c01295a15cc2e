"""Chooses what schedules the pods of a job as a group."""

from finetune_api.v1alpha1.job import FineTuneJobSpec
from finetune_api.v1alpha1.scheduling import (
    WITH_QUEUE,
    WITHOUT_QUEUE,
    Scheduling,
    SchedulingProvider,
    SchedulingStatus,
    lacks_preferred_topology,
    lacks_topology,
)
from finetune_operator.observation.group_apis import GroupApis


def choose_provider(spec: FineTuneJobSpec, apis: GroupApis) -> SchedulingStatus | str:
    """Return the provider for a job with spec.scheduling, or the explanation why the cluster has none for it."""
    scheduling = spec.scheduling
    assert scheduling is not None
    reasons = []
    for provider in _list_candidates(scheduling):
        problem = apis.problems.get(provider) or _find_problem(spec, scheduling, provider)
        if provider not in apis.versions:
            problem = "is not installed"
        if problem is None:
            version, queue = apis.versions[provider], scheduling.queue_name or ""
            return SchedulingStatus(provider=provider, api_version=version, queue_name=queue)
        reasons.append(f"{provider} {problem}")
    return f"nothing in the cluster schedules the pods as a group: {'; '.join(reasons)}"


def _list_candidates(scheduling: Scheduling) -> tuple[SchedulingProvider, ...]:
    if scheduling.provider is not None:
        return (scheduling.provider,)
    return WITH_QUEUE if scheduling.queue_name else WITHOUT_QUEUE


def _find_problem(spec: FineTuneJobSpec, scheduling: Scheduling, provider: SchedulingProvider) -> str | None:
    if lacks_topology(provider, scheduling):
        return "has no topology by label"
    if lacks_preferred_topology(provider, scheduling):
        return "supports only the topology mode Required"
    if provider is SchedulingProvider.COSCHEDULING and spec.pod_template.scheduler_name is None:
        return "requires spec.podTemplate.schedulerName"
    return None
