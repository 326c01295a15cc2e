"""Faults of Kubernetes nodes: they are lost, recover, break, or are occupied by pods of other users."""

from testing.simulator.incidents.job_incidents import Incident, recover_later
from testing.simulator.world.kubernetes_nodes import KubernetesNode
from testing.simulator.world.world import World


def kubelet_lost_temporarily(world: World) -> None:
    """A kubelet dies and comes back; its containers keep running."""
    k8s_node = _pick_k8s_node(world, "is lost")
    world.node_controllers.stop_kubelet(k8s_node)
    recover_later(world, lambda: world.node_controllers.recover(k8s_node))


def kubelet_lost_permanently(world: World) -> None:
    """A kubelet dies and never comes back."""
    world.node_controllers.stop_kubelet(_pick_k8s_node(world, "is lost permanently"))


def power_lost(world: World) -> None:
    """A Kubernetes node and all its processes die without any report."""
    k8s_node = _pick_k8s_node(world, "has no power")
    world.node_controllers.stop_kubelet(k8s_node)
    _kill_processes(world, k8s_node)


def network_partitioned(world: World) -> None:
    """A Kubernetes node can reach neither the API server nor the other ranks for a while."""
    k8s_node = _pick_k8s_node(world, "is partitioned")
    world.node_controllers.partition(k8s_node)
    links = [world.trainer.partition(process) for process in world.k8s_nodes.processes_on(k8s_node)]

    def reconnect() -> None:
        world.node_controllers.recover(k8s_node)
        for link in links:
            link()

    recover_later(world, reconnect)


def k8s_node_reclaimed(world: World) -> None:
    """A cloud provider reclaims a node and deletes its Node object."""
    k8s_node = _pick_k8s_node(world, "is reclaimed")
    world.node_controllers.stop_kubelet(k8s_node)
    _kill_processes(world, k8s_node)
    world.node_controllers.delete_node(k8s_node)


def k8s_node_deleted(world: World) -> None:
    """kubectl delete node, of a healthy or a lost node."""
    k8s_node = _pick_k8s_node(world, "is deleted")
    if world.choices.chance(50):
        world.node_controllers.stop_kubelet(k8s_node)
    world.node_controllers.delete_node(k8s_node)
    recover_later(world, lambda: world.node_controllers.recover(k8s_node))


def k8s_node_out_of_service(world: World) -> None:
    """A Kubernetes node is lost and tainted as out of service; it recovers nevertheless."""
    k8s_node = _pick_k8s_node(world, "is out of service")
    world.node_controllers.stop_kubelet(k8s_node)
    world.node_controllers.taint_out_of_service(k8s_node)
    recover_later(world, lambda: world.node_controllers.recover(k8s_node))


def gpu_broken(world: World) -> None:
    """A GPU fails every process on its Kubernetes node; at most one breaks."""
    if not any(k8s_node.gpu_broken for k8s_node in world.k8s_nodes.nodes):
        world.k8s_nodes.break_gpu(_pick_k8s_node(world, "has a broken GPU"))


def cluster_full(world: World) -> None:
    """No pod can be scheduled for a while."""
    world.k8s_nodes.accepts_pods = False

    def free_resources() -> None:
        world.k8s_nodes.accepts_pods = True

    recover_later(world, free_resources)


def k8s_nodes_occupied(world: World) -> None:
    """Pods of other users occupy all Kubernetes nodes but one or two for a while."""
    k8s_nodes = world.k8s_nodes.nodes
    free_names = {k8s_nodes[world.choices.number(len(k8s_nodes))].name for _ in range(2)}
    occupied_nodes = [k8s_node for k8s_node in k8s_nodes if k8s_node.name not in free_names]

    def set_occupied(occupied: bool) -> None:
        for k8s_node in occupied_nodes:
            k8s_node.occupied = occupied

    set_occupied(True)
    recover_later(world, lambda: set_occupied(False))


def _pick_k8s_node(world: World, event: str) -> KubernetesNode:
    k8s_node = world.pick_k8s_node()
    world.add_trace(f"{k8s_node.name} {event}")
    return k8s_node


def _kill_processes(world: World, k8s_node: KubernetesNode) -> None:
    for process in world.k8s_nodes.processes_on(k8s_node):
        world.trainer.kill(process, reason="ContainerStatusUnknown")  # the reason that a restarted kubelet reports


NODE_LOSSES: tuple[Incident, ...] = (
    *(3 * (kubelet_lost_temporarily, kubelet_lost_permanently, power_lost)),
    *(2 * (k8s_node_reclaimed, k8s_node_out_of_service, k8s_node_deleted)),
)

NODE_INCIDENTS: tuple[Incident, ...] = (  # frequent ones several times
    *NODE_LOSSES,
    *(2 * (network_partitioned, cluster_full, k8s_nodes_occupied)),
    gpu_broken,
)
