"""Defines scheduling gates, resource claims and topology spread constraints of the pods, as in the Kubernetes API."""

from collections.abc import Iterable
from typing import ClassVar, Literal

from pydantic import Field

from finetune_api.v1alpha1.base import CelRule, CrossFieldRule, Model, ModelWithRules
from finetune_api.v1alpha1.kubernetes_types import LabelSelector
from finetune_api.v1alpha1.name_types import DnsLabel, ObjectName, QualifiedName

_MAX_INT32 = 2**31 - 1


class SchedulingGate(Model):
    """A gate that keeps the pods from being scheduled until another controller removes it."""

    name: QualifiedName = Field(description="Name of the gate.")


class PodResourceClaim(ModelWithRules):
    """A ResourceClaim of each pod (dynamic resource allocation): of its own from a template, or one for all pods."""

    name: DnsLabel = Field(description="Name by which resources.claims refers to the claim.")
    resource_claim_name: ObjectName | None = Field(
        default=None, description="A ResourceClaim in the job's namespace, which all pods share."
    )
    resource_claim_template_name: ObjectName | None = Field(
        default=None,
        description="A ResourceClaimTemplate in the job's namespace, from which each pod gets its own ResourceClaim.",
    )

    rules: ClassVar[tuple[CrossFieldRule["PodResourceClaim"], ...]] = (
        CrossFieldRule.from_cel_rule(
            "one source",
            lambda claim: (claim.resource_claim_name is None) == (claim.resource_claim_template_name is None),
            CelRule(
                "has(self.resourceClaimName) != has(self.resourceClaimTemplateName)",
                "exactly one of resourceClaimName, resourceClaimTemplateName must be set",
            ),
        ),
    )


class ContainerResourceClaim(Model):
    """A ResourceClaim whose devices the trainer container uses, as in a pod."""

    name: DnsLabel = Field(description="Name of a claim in podTemplate.resourceClaims.")
    request: DnsLabel | None = Field(
        default=None, description="Name of a request in the claim; absent: all devices of the claim."
    )


class TopologySpreadConstraint(ModelWithRules):
    """A limit for the uneven spread of the pods over topology domains, such as Kubernetes nodes, racks or zones."""

    max_skew: int = Field(ge=1, le=_MAX_INT32, description="Maximum difference of the numbers of pods in two domains.")
    topology_key: QualifiedName = Field(description="Label of Kubernetes nodes that identifies the domain.")
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"] = Field(
        description="DoNotSchedule: pods wait rather than exceed maxSkew. ScheduleAnyway: it is only preferred."
    )
    label_selector: LabelSelector | None = Field(
        default=None,
        description="Pods to count (default: those of the attempt, or of the job if scheduling is set).",
    )
    min_domains: int | None = Field(
        default=None, ge=1, le=_MAX_INT32, description="Minimum number of domains; only with DoNotSchedule."
    )
    node_affinity_policy: Literal["Honor", "Ignore"] | None = Field(
        default=None, description="Whether only domains count that nodeSelector and affinity permit, as in a pod."
    )
    node_taints_policy: Literal["Honor", "Ignore"] | None = Field(
        default=None, description="Whether only Kubernetes nodes count whose taints are tolerated, as in a pod."
    )
    match_label_keys: tuple[QualifiedName, ...] = Field(
        default=(), max_length=16, description="Labels whose values a counted pod shares with the pod, as in a pod."
    )

    rules: ClassVar[tuple[CrossFieldRule["TopologySpreadConstraint"], ...]] = (
        CrossFieldRule.from_cel_rule(
            "minDomains needs DoNotSchedule",
            lambda spread: spread.min_domains is not None and spread.when_unsatisfiable != "DoNotSchedule",
            CelRule(
                "!has(self.minDomains) || self.whenUnsatisfiable == 'DoNotSchedule'",
                "minDomains works only with whenUnsatisfiable DoNotSchedule; set it, or remove minDomains",
            ),
        ),
    )


def find_duplicate(values: Iterable[str]) -> str | None:
    """Return a value that occurs more than once; None if all are distinct."""
    seen: set[str] = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    return None
