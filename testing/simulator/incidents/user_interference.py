"""Changes by users to what a job needs: its Service, ConfigMap, labels and quota; also clock jumps."""

from datetime import timedelta

from finetune_operator import names
from testing.simulator.incidents.job_incidents import (
    Incident,
    operator_crashed,
    pod_deleted,
    rank_killed,
    recover_later,
    suspended_temporarily,
)
from testing.simulator.incidents.node_incidents import k8s_nodes_occupied, kubelet_lost_temporarily
from testing.simulator.world.apiserver import Key
from testing.simulator.world.world import JOB, World

CLOCK_OFFSETS = (-20.0, 5.0, -20_000.0, 20_000.0)  # seconds


def job_recreated(world: World) -> None:
    """kubectl delete ftj, followed at once by kubectl apply."""
    if job := world.job:
        world.delete(JOB, {"propagationPolicy": "Background"})
        world.apply(job["spec"])


def quota_exhausted(world: World) -> None:
    """A ResourceQuota allows fewer pods than the job needs, for a while."""
    world.server.pod_quota = world.choices.pick((1, 0, 2))

    def remove_quota() -> None:
        world.server.pod_quota = None

    recover_later(world, remove_quota)


def service_deleted(world: World) -> None:
    """kubectl delete service."""
    world.delete(Key("Service", JOB.namespace, names.service_name(JOB.name)), {})


def service_edited(world: World) -> None:
    """kubectl edit service: its selector matches no pod any more."""
    key = Key("Service", JOB.namespace, names.service_name(JOB.name))
    if service := world.server.get(key):
        world.server.change(key, actor="user", spec={**service["spec"], "selector": {"app": "another"}})


def config_map_deleted(world: World) -> None:
    """kubectl delete configmap, for the current attempt."""
    world.delete(world.config_map_key(), {})


def labels_edited(world: World) -> None:
    """kubectl label, of a pod or the Service: label selectors no longer match it, or match it wrongly."""
    labelled_objects = [
        (key, body)
        for kind in ("Pod", "Service")
        for key, body in world.server.all(kind)
        if "labels" in body["metadata"]
    ]
    if labelled_objects:
        key, existing = world.choices.pick(labelled_objects)
        label = world.choices.pick((names.JOB_UID, names.ATTEMPT, names.NODE_RANK, names.MANAGED_BY))
        value = world.choices.pick(("", "another"))
        labels = {**existing["metadata"]["labels"], label: value}
        nonempty_labels = {label: value for label, value in labels.items() if value}
        world.server.change(key, actor="user", metadata={**existing["metadata"], "labels": nonempty_labels})


def pods_rejected_by_kubelets(world: World) -> None:
    """Kubelets have fewer free resources than the scheduler assumes, for a while."""
    k8s_nodes = world.k8s_nodes.nodes[: 1 + world.choices.number(len(world.k8s_nodes.nodes))]

    def set_rejecting(rejecting: bool) -> None:
        for k8s_node in k8s_nodes:
            k8s_node.rejects_pods = rejecting

    set_rejecting(True)
    recover_later(world, lambda: set_rejecting(False))


def clock_jumped(world: World) -> None:
    """The clock of an operator's host is wrong for a while."""
    operator = world.operators[-1]
    seconds = world.choices.pick(CLOCK_OFFSETS)
    world.operator_clock_was_ahead |= seconds > 0
    operator.clock_offset = timedelta(seconds=seconds)

    def correct_clock() -> None:
        operator.clock_offset = timedelta()

    recover_later(world, correct_clock)


USER_INTERFERENCE: tuple[Incident, ...] = (  # frequent ones several times
    *(4 * (job_recreated, quota_exhausted)),
    *(
        2
        * (
            service_deleted,
            service_edited,
            config_map_deleted,
            labels_edited,
            pods_rejected_by_kubelets,
            clock_jumped,
            rank_killed,
            suspended_temporarily,
        )
    ),
    pod_deleted,
    operator_crashed,
    kubelet_lost_temporarily,
    k8s_nodes_occupied,
)
