"""Incidents of Kubernetes nodes, such as node loss, broken GPUs and pods of other users."""

from testing.simulator.incidents.job_incidents import Incident, recover_later
from testing.simulator.world.job import SimulatedJob
from testing.simulator.world.kubernetes_nodes import KubernetesNode
from testing.simulator.world.world import World


def stop_kubelet_temporarily(world: World, job: SimulatedJob) -> None:
    """Temporarily stop a kubelet; its containers keep running."""
    k8s_node = _pick_k8s_node(world, job, "is lost")
    world.node_controllers.stop_kubelet(k8s_node)
    recover_later(world, lambda: world.node_controllers.recover(k8s_node))


def stop_kubelet_permanently(world: World, job: SimulatedJob) -> None:
    """Stop a kubelet without restarting it."""
    world.node_controllers.stop_kubelet(_pick_k8s_node(world, job, "is lost permanently"))


def cut_power(world: World, job: SimulatedJob) -> None:
    """Stop a Kubernetes node and all its processes, as a power failure does."""
    k8s_node = _pick_k8s_node(world, job, "has no power")
    world.node_controllers.stop_kubelet(k8s_node)
    _kill_processes(world, k8s_node)


def partition_k8s_node(world: World, job: SimulatedJob) -> None:
    """Temporarily disconnect a Kubernetes node from the API server and from the other ranks."""
    k8s_node = _pick_k8s_node(world, job, "is partitioned")
    world.node_controllers.partition(k8s_node)
    reconnect_functions = [world.trainer.partition(process) for process in world.k8s_nodes.list_processes_on(k8s_node)]

    def reconnect() -> None:
        world.node_controllers.recover(k8s_node)
        for reconnect_process in reconnect_functions:
            reconnect_process()

    recover_later(world, reconnect)


def reclaim_k8s_node(world: World, job: SimulatedJob) -> None:
    """Stop a node and delete its Node object, as a cloud provider does when it reclaims the node."""
    k8s_node = _pick_k8s_node(world, job, "is reclaimed")
    world.node_controllers.stop_kubelet(k8s_node)
    _kill_processes(world, k8s_node)
    world.node_controllers.delete_node(k8s_node)


def delete_k8s_node(world: World, job: SimulatedJob) -> None:
    """Delete the Node object of a healthy or a lost node."""
    k8s_node = _pick_k8s_node(world, job, "is deleted")
    if world.choices.draw_boolean(50):
        world.node_controllers.stop_kubelet(k8s_node)
    world.node_controllers.delete_node(k8s_node)
    recover_later(world, lambda: world.node_controllers.recover(k8s_node))


def taint_k8s_node_out_of_service(world: World, job: SimulatedJob) -> None:
    """Temporarily stop a kubelet and taint its node as out of service."""
    k8s_node = _pick_k8s_node(world, job, "is out of service")
    world.node_controllers.stop_kubelet(k8s_node)
    world.node_controllers.taint_out_of_service(k8s_node)
    recover_later(world, lambda: world.node_controllers.recover(k8s_node))


def break_gpu(world: World, job: SimulatedJob) -> None:
    """Break a GPU, so that every process on its Kubernetes node fails; at most one GPU breaks."""
    if not any(k8s_node.has_broken_gpu for k8s_node in world.k8s_nodes.nodes):
        world.k8s_nodes.break_gpu(_pick_k8s_node(world, job, "has a broken GPU"))


def fill_cluster(world: World, job: SimulatedJob) -> None:
    """Temporarily prevent the scheduling of all pods."""
    world.k8s_nodes.accepts_pods = False

    def free_resources() -> None:
        world.k8s_nodes.accepts_pods = True

    recover_later(world, free_resources)


def occupy_k8s_nodes(world: World, job: SimulatedJob) -> None:
    """Temporarily occupy all Kubernetes nodes except one or two with pods of other users."""
    k8s_nodes = world.k8s_nodes.nodes
    free_names = {k8s_nodes[world.choices.draw_number(len(k8s_nodes))].name for _ in range(2)}
    occupied_nodes = [k8s_node for k8s_node in k8s_nodes if k8s_node.name not in free_names]

    def set_occupied(occupied: bool) -> None:
        for k8s_node in occupied_nodes:
            k8s_node.is_occupied = occupied

    set_occupied(True)
    recover_later(world, lambda: set_occupied(False))


def _pick_k8s_node(world: World, job: SimulatedJob, event: str) -> KubernetesNode:
    k8s_node = job.pick_k8s_node()
    world.add_trace(f"{k8s_node.name} {event}")
    return k8s_node


def _kill_processes(world: World, k8s_node: KubernetesNode) -> None:
    for process in world.k8s_nodes.list_processes_on(k8s_node):
        world.trainer.kill(process, reason="ContainerStatusUnknown")  # a restarted kubelet reports this reason


NODE_LOSSES: tuple[Incident, ...] = (
    *(3 * (stop_kubelet_temporarily, stop_kubelet_permanently, cut_power)),
    *(2 * (reclaim_k8s_node, taint_k8s_node_out_of_service, delete_k8s_node)),
)

NODE_INCIDENTS: tuple[Incident, ...] = (  # an incident that is listed several times is drawn more often
    *NODE_LOSSES,
    *(2 * (partition_k8s_node, fill_cluster, occupy_k8s_nodes)),
    break_gpu,
)
