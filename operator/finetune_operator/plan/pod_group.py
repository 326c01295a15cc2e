"""Builds what makes the pods of an attempt one group for a scheduler: labels, annotations, spec fields, PodGroup.

The tests run the groups of Kueue and Kubernetes; those of Coscheduling, Volcano and KAI are compared with the schemas
in testing/schemas. Volcano and KAI order groups by the PriorityClass of the PodGroup, Coscheduling by that of the pods.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from finetune_api.v1alpha1.scheduling import Scheduling, SchedulingProvider
from finetune_operator import names
from finetune_operator.plan.object_metadata import Manifest, build_metadata
from finetune_operator.plan.run_plan import RunPlan

_KUEUE_TOPOLOGY = {"Required": "podset-required-topology", "Preferred": "podset-preferred-topology"}
_KAI_NODE_POOL = "kai.scheduler/node-pool"


@dataclass(frozen=True)
class GroupFields:
    """Fields of every pod of a group, and those of its PodGroup; the provider has no PodGroup if its spec is empty."""

    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    pod_spec: Mapping[str, Any] = field(default_factory=dict)
    group_spec: Mapping[str, Any] = field(default_factory=dict)
    group_labels: Mapping[str, str] = field(default_factory=dict)


def build_group_fields(run_plan: RunPlan) -> GroupFields:
    """Return the fields of the provider that schedules the attempt; they are empty without spec.scheduling."""
    scheduling = run_plan.spec.scheduling
    if scheduling is None or run_plan.scheduling is None:
        return GroupFields()
    return _BUILDERS[SchedulingProvider(run_plan.scheduling.provider)](run_plan, scheduling)


def build_pod_group(run_plan: RunPlan) -> Manifest | None:
    """Return the PodGroup of an attempt; None if the provider needs none."""
    group = build_group_fields(run_plan)
    if not group.group_spec or run_plan.scheduling is None:
        return None
    metadata = build_metadata(run_plan, run_plan.pod_group_name, with_attempt_label=True)
    return {
        "apiVersion": run_plan.scheduling.api_version,
        "kind": names.POD_GROUP_KIND,
        "metadata": {**metadata, "labels": {**group.group_labels, **metadata["labels"]}},
        "spec": dict(group.group_spec),
    }


def _build_for_kueue(run_plan: RunPlan, scheduling: Scheduling) -> GroupFields:
    """Build a plain pod group, to which Kueue adds its own label, finalizer and scheduling gates.

    With a topology constraint, Kueue places the pods in the order of their ranks.
    Source: https://kueue.sigs.k8s.io/docs/tasks/run/plain_pods
    """
    labels = {
        "queue-name": scheduling.queue_name,
        "pod-group-name": names.workload_name(run_plan.job_name, run_plan.job_uid),
        "priority-class": scheduling.priority_class_name,
    }
    annotations = {"pod-group-total-count": str(len(run_plan.nodes))}
    for constraint in scheduling.scheduling_constraints.topology:
        annotations[_KUEUE_TOPOLOGY[constraint.mode]] = constraint.key
        annotations["pod-group-pod-index-label"] = names.NODE_RANK
    return GroupFields(
        labels={f"{names.KUEUE_PREFIX}{name}": value for name, value in labels.items() if value is not None},
        annotations={f"{names.KUEUE_PREFIX}{name}": value for name, value in annotations.items()},
    )


def _build_for_kubernetes(run_plan: RunPlan, scheduling: Scheduling) -> GroupFields:
    """Build a PodGroup of scheduling.k8s.io, which the scheduler of Kubernetes preempts as a whole since 1.37."""
    spec: Manifest = {"schedulingPolicy": {"gang": {"minCount": len(run_plan.nodes)}}}
    if run_plan.scheduling is not None and run_plan.scheduling.api_version.endswith("/v1beta1"):
        spec["disruptionMode"] = {"all": {}}
    if topology := scheduling.scheduling_constraints.topology:
        spec["schedulingConstraints"] = {"topology": [{"key": constraint.key} for constraint in topology]}
    return GroupFields(
        pod_spec={
            "schedulingGroup": {"podGroupName": run_plan.pod_group_name},
            **_build_priority(run_plan, scheduling),
        },
        group_spec={**spec, **_build_priority(run_plan, scheduling)},
    )


def _build_for_coscheduling(run_plan: RunPlan, scheduling: Scheduling) -> GroupFields:
    """Build a PodGroup of the coscheduling plugin; spec.podTemplate.schedulerName names the scheduler that has it.

    The PodGroup has no PriorityClass: the plugin orders groups by the priority of their pods.
    Source: https://github.com/kubernetes-sigs/scheduler-plugins/tree/v0.34.7/pkg/coscheduling
    """
    return GroupFields(
        labels={"scheduling.x-k8s.io/pod-group": run_plan.pod_group_name},
        pod_spec=_build_priority(run_plan, scheduling),
        group_spec={"minMember": len(run_plan.nodes)},
    )


def _build_for_volcano(run_plan: RunPlan, scheduling: Scheduling) -> GroupFields:
    """Build a PodGroup of Volcano, which places the group in its queue `default` unless the job names one.

    Without minResources, Volcano considers the group at once and shows in its pods why they wait, and a PodGroup whose
    pods are deleted holds no quota.
    Source: https://github.com/volcano-sh/volcano/blob/v1.15.1/staging/src/volcano.sh/apis/pkg/apis/scheduling/v1beta1
    """
    queue = {} if scheduling.queue_name is None else {"queue": scheduling.queue_name}
    return GroupFields(
        annotations={"scheduling.k8s.io/group-name": run_plan.pod_group_name},
        pod_spec={"schedulerName": _get_scheduler(run_plan, "volcano"), **_build_priority(run_plan, scheduling)},
        group_spec={"minMember": len(run_plan.nodes), **queue, **_build_priority(run_plan, scheduling)},
    )


def _build_for_kai(run_plan: RunPlan, scheduling: Scheduling) -> GroupFields:
    """Build a PodGroup of the KAI scheduler.

    KAI's pod grouper leaves pods with the annotation skip-podgrouper alone since KAI 0.15; it would otherwise replace
    the group by one without a minimum. The scheduler of a node pool reads only PodGroups with the label of the pool.
    Source: https://github.com/kai-scheduler/KAI-Scheduler/blob/v0.17.0/docs/developer/pod-grouper.md#external-podgroups
    """
    labels = run_plan.spec.pod_template.labels
    return GroupFields(
        labels={"kai.scheduler/queue": scheduling.queue_name or ""},
        annotations={"kai.scheduler/skip-podgrouper": "true", "pod-group-name": run_plan.pod_group_name},
        pod_spec={"schedulerName": _get_scheduler(run_plan, "kai-scheduler"), **_build_priority(run_plan, scheduling)},
        group_spec={
            "minMember": len(run_plan.nodes),
            "queue": scheduling.queue_name,
            **_build_priority(run_plan, scheduling),
        },
        group_labels={_KAI_NODE_POOL: labels[_KAI_NODE_POOL]} if _KAI_NODE_POOL in labels else {},
    )


def _get_scheduler(run_plan: RunPlan, default: str) -> str:
    return run_plan.spec.pod_template.scheduler_name or default


def _build_priority(run_plan: RunPlan, scheduling: Scheduling) -> Manifest:
    """Return the PriorityClass of the group and its pods, which has to be the same in both."""
    name = scheduling.priority_class_name or run_plan.spec.pod_template.priority_class_name
    return {} if name is None else {"priorityClassName": name}


_BUILDERS: dict[SchedulingProvider, Callable[[RunPlan, Scheduling], GroupFields]] = {
    SchedulingProvider.KUEUE: _build_for_kueue,
    SchedulingProvider.POD_GROUP: _build_for_kubernetes,
    SchedulingProvider.COSCHEDULING: _build_for_coscheduling,
    SchedulingProvider.VOLCANO: _build_for_volcano,
    SchedulingProvider.KAI: _build_for_kai,
}
