"""Incidents of gangs: preemption by other tenants, and changes to the PodGroup API during upgrades."""

from finetune_operator import names
from testing.simulator.incidents.job_incidents import Incident, recover_later
from testing.simulator.world.apiserver import POD_GROUP_VERSION, ObjectKey
from testing.simulator.world.job import SimulatedJob
from testing.simulator.world.kubernetes_nodes import KubernetesNode
from testing.simulator.world.world import World


def preempt_gang(world: World, job: SimulatedJob) -> None:
    """Preempt the gang of the job in favour of pods of another tenant, which temporarily occupy its nodes."""
    name = names.pod_group_name(job.key.name, job.uid, job.status.get("attempt") or 0)
    group = ObjectKey(names.POD_GROUP_KIND, job.key.namespace, name)
    placed = (world.k8s_nodes.find_k8s_node(pod) for _, pod in world.gang_scheduler.list_placed_pods(group))
    k8s_nodes: list[KubernetesNode] = [k8s_node for k8s_node in placed if k8s_node is not None]

    def set_occupied(occupied: bool) -> None:
        for k8s_node in k8s_nodes:
            k8s_node.is_occupied = occupied

    set_occupied(True)
    world.gang_scheduler.preempt(group)
    recover_later(world, lambda: set_occupied(False))


def remove_pod_group_api(world: World, job: SimulatedJob) -> None:
    """Temporarily stop serving PodGroups, as before an upgrade of the control plane."""
    world.server.served_versions.discard(POD_GROUP_VERSION)
    world.add_trace("PodGroups are not served")

    def restore() -> None:
        world.server.served_versions.add(POD_GROUP_VERSION)
        world.add_trace("PodGroups are served")

    recover_later(world, restore)


def switch_off_feature_gate(world: World, job: SimulatedJob) -> None:
    """Temporarily disable GenericWorkload, so that the API server drops spec.schedulingGroup of new pods."""
    world.server.keeps_scheduling_groups = False
    world.add_trace("new pods lose spec.schedulingGroup")

    def switch_on() -> None:
        world.server.keeps_scheduling_groups = True
        world.add_trace("new pods keep spec.schedulingGroup")

    recover_later(world, switch_on)


def reject_pod_groups(world: World, job: SimulatedJob) -> None:
    """Temporarily set a ResourceQuota that allows no further PodGroup."""
    world.server.rejects_pod_groups = True

    def remove_quota() -> None:
        world.server.rejects_pod_groups = False

    recover_later(world, remove_quota)


UPGRADES: tuple[Incident, ...] = (remove_pod_group_api, switch_off_feature_gate, reject_pod_groups)

GANG_INCIDENTS: tuple[Incident, ...] = (*(3 * (preempt_gang,)), *UPGRADES)
