"""Defines how the pods of a job are queued and placed as a group."""

from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from finetune_api.v1alpha1.base import CelRule, CrossFieldRule, Model, ModelWithRules, StatusModel
from finetune_api.v1alpha1.name_types import DnsLabel

TopologyKey = Annotated[
    str,
    StringConstraints(
        pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$", max_length=253
    ),
]


KUEUE_PREFIX = "kueue.x-k8s.io/"  # of labels, annotations and gates that Kueue reads or sets


class SchedulingProvider(StrEnum):
    """Software that admits or schedules the pods of a job as a group."""

    KUEUE = "Kueue"
    POD_GROUP = "PodGroup"  # the scheduler of Kubernetes 1.36 or later
    COSCHEDULING = "Coscheduling"
    VOLCANO = "Volcano"
    KAI = "KAI"


# versions that the operator can use, the preferred one first
API_VERSIONS: dict[SchedulingProvider, tuple[str, ...]] = {
    SchedulingProvider.KUEUE: ("kueue.x-k8s.io/v1beta2",),
    SchedulingProvider.POD_GROUP: ("scheduling.k8s.io/v1beta1", "scheduling.k8s.io/v1alpha2"),  # Kubernetes 1.37, 1.36
    SchedulingProvider.COSCHEDULING: ("scheduling.x-k8s.io/v1alpha1",),
    SchedulingProvider.VOLCANO: ("scheduling.volcano.sh/v1beta1",),
    SchedulingProvider.KAI: ("scheduling.run.ai/v2alpha2",),
}
# providers by what a job needs of them
WITH_QUEUE = (SchedulingProvider.KUEUE, SchedulingProvider.VOLCANO, SchedulingProvider.KAI)
WITHOUT_QUEUE = (SchedulingProvider.POD_GROUP, SchedulingProvider.COSCHEDULING, SchedulingProvider.VOLCANO)
QUEUE_REQUIRED = (SchedulingProvider.KUEUE, SchedulingProvider.KAI)
WITH_TOPOLOGY = (SchedulingProvider.KUEUE, SchedulingProvider.POD_GROUP)


class TopologyConstraint(Model):
    """Places all pods of an attempt in one topology domain, such as a rack."""

    key: TopologyKey = Field(description="Label of Kubernetes nodes that identifies the domain.")
    mode: Literal["Required", "Preferred"] = Field(
        default="Required",
        description="Required: the job waits until one domain has room for all pods. Preferred: it may use several"
        " (Kueue only).",
    )


class SchedulingConstraints(Model):
    """Constraints on the Kubernetes nodes that the pods share."""

    topology: tuple[TopologyConstraint, ...] = Field(
        default=(),
        min_length=1,
        max_length=1,
        description="Domain in which all pods are placed (Kueue and PodGroup only).",
    )


def lacks_topology(provider: SchedulingProvider, scheduling: "Scheduling") -> bool:
    """Return whether the job asks for a topology domain, and the provider has none by label."""
    return bool(scheduling.scheduling_constraints.topology) and provider not in WITH_TOPOLOGY


def lacks_preferred_topology(provider: SchedulingProvider, scheduling: "Scheduling") -> bool:
    """Return whether the job prefers one topology domain, but the provider can only require one."""
    is_preferred = any(each.mode == "Preferred" for each in scheduling.scheduling_constraints.topology)
    return is_preferred and provider is not SchedulingProvider.KUEUE


def _find_provider_problem(scheduling: "Scheduling") -> str | None:
    """Return why the provider that the spec names cannot do what the spec asks of it."""
    provider, queue = scheduling.provider, scheduling.queue_name
    if provider is None:
        return None
    if queue is None and provider in QUEUE_REQUIRED:
        return f"queueName is required with provider {provider}"
    if queue is not None and provider not in WITH_QUEUE:
        return f"queueName: provider {provider} has no queues; remove it"
    if lacks_topology(provider, scheduling):
        return f"schedulingConstraints.topology: provider {provider} has no topology by label; remove it"
    if lacks_preferred_topology(provider, scheduling):
        return f"schedulingConstraints.topology[0].mode: provider {provider} supports only Required"
    return None


def _quote(providers: tuple[SchedulingProvider, ...]) -> str:
    return "[" + ", ".join(f"'{provider}'" for provider in providers) + "]"


_HAS_TOPOLOGY = "has(self.schedulingConstraints) && has(self.schedulingConstraints.topology)"


class Scheduling(ModelWithRules):
    """Queue of the job and placement of its pods, which are admitted and placed together."""

    provider: SchedulingProvider | None = Field(
        default=None,
        description="What schedules the pods as a group (default: the first that the cluster has: with queueName of"
        " Kueue, Volcano, KAI; without it of PodGroup, Coscheduling, Volcano).",
    )
    queue_name: DnsLabel | None = Field(
        default=None, description="LocalQueue of Kueue in the namespace of the job, or queue of Volcano or KAI."
    )
    priority_class_name: DnsLabel | None = Field(
        default=None,
        description="WorkloadPriorityClass of Kueue; with other providers the PriorityClass of the group and its pods"
        " (default: podTemplate.priorityClassName).",
    )
    scheduling_constraints: SchedulingConstraints = Field(
        default=SchedulingConstraints(), description="Constraints on the Kubernetes nodes that the pods share."
    )

    rules: ClassVar[tuple[CrossFieldRule["Scheduling"], ...]] = (
        CrossFieldRule(
            "the provider supports the queue and the topology",
            _find_provider_problem,
            (
                CelRule(
                    f"!has(self.provider) || has(self.queueName) || !(self.provider in {_quote(QUEUE_REQUIRED)})",
                    "queueName is required with this provider",
                ),
                CelRule(
                    f"!has(self.provider) || !has(self.queueName) || self.provider in {_quote(WITH_QUEUE)}",
                    "queueName: the provider has no queues; remove it",
                ),
                CelRule(
                    f"!has(self.provider) || !({_HAS_TOPOLOGY}) || self.provider in {_quote(WITH_TOPOLOGY)}",
                    "schedulingConstraints.topology: the provider has no topology by label; remove it",
                ),
                CelRule(
                    f"!has(self.provider) || self.provider == 'Kueue' || !({_HAS_TOPOLOGY})"
                    " || self.schedulingConstraints.topology.all(t, !has(t.mode) || t.mode != 'Preferred')",
                    "schedulingConstraints.topology: the provider supports only the mode Required",
                ),
            ),
        ),
    )


class SchedulingStatus(StatusModel):
    """What schedules the pods of the current attempt as a group."""

    provider: str = Field(
        description="Provider that was chosen when the attempt was started: Kueue, PodGroup, Coscheduling, Volcano or"
        " KAI.",
        json_schema_extra={"maxLength": 64},
    )
    api_version: str = Field(description="API of the provider in the cluster.", json_schema_extra={"maxLength": 128})
    queue_name: str = Field(
        default="", description="Queue of the job; empty without a queue.", json_schema_extra={"maxLength": 253}
    )
    position: int | None = Field(
        default=None, description="Position in the queue while the job waits for Kueue; the first job has position 1."
    )
