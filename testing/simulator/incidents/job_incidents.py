"""Faults of users, trainers and operators; node_incidents.py has those of Kubernetes nodes."""

import asyncio
from collections.abc import Callable

from finetune_operator import names
from testing.simulator.world.apiserver import Key
from testing.simulator.world.world import JOB, World

RECOVERY_DELAYS_SECONDS = (10.0, 100.0, 400.0)
ERROR_TYPES = ("RuntimeError", "CudaError", "NonFiniteLoss")

Incident = Callable[[World], None]


def recover_later(world: World, recover: Callable[[], None]) -> None:
    """Call `recover` after a random time, or when the faults end."""

    def recover_once() -> None:
        if recover in world.pending_recoveries:
            world.pending_recoveries.remove(recover)
            recover()

    world.pending_recoveries.append(recover)
    asyncio.get_running_loop().call_later(world.choices.pick(RECOVERY_DELAYS_SECONDS), recover_once)


def pod_deleted(world: World) -> None:
    """kubectl delete pod."""
    if picked := world.pick_pod():
        world.delete(picked[0], {})


def pod_force_deleted(world: World) -> None:
    """kubectl delete pod --force: the object is removed at once, its processes still run."""
    if picked := world.pick_pod():
        world.delete(picked[0], {"gracePeriodSeconds": 0})


def pod_evicted(world: World) -> None:
    """kubectl drain."""
    if picked := world.pick_pod():
        world.node_controllers.disrupt_pod(picked[0], "EvictionByEvictionAPI")


def pod_evicted_by_taint(world: World) -> None:
    """A taint is added to a Kubernetes node with a healthy kubelet."""
    if picked := world.pick_pod():
        world.node_controllers.disrupt_pod(picked[0], "DeletionByTaintManager")


def suspended(world: World) -> None:
    """The user sets spec.suspend to true."""
    world.edit_spec(suspend=True)


def suspended_temporarily(world: World) -> None:
    """The user sets spec.suspend to true, and later to false."""
    world.edit_spec(suspend=True)
    recover_later(world, lambda: world.edit_spec(suspend=False))


def resumed_with_other_node_count(world: World) -> None:
    """The user suspends the job, changes numNodes and resumes it."""
    world.edit_spec(suspend=True)
    world.edit_spec(numNodes=world.choices.pick((1, 2, 3)))
    recover_later(world, lambda: world.edit_spec(suspend=False))


def resumed(world: World) -> None:
    """The user sets spec.suspend to false."""
    world.edit_spec(suspend=False)


def annotation_edited(world: World) -> None:
    """An annotation of the job is changed."""
    world.touch()


def job_deleted(world: World) -> None:
    """kubectl delete ftj, in the background or in the foreground."""
    world.delete(JOB, {"propagationPolicy": world.choices.pick(("Background", "Foreground"))})


def rank_killed(world: World) -> None:
    """SIGKILL of a rank, which its supervisor reports."""
    if process := world.pick_process():
        world.trainer.fail(process, error_type="RankKilled", message="a rank was killed", signal=9)


def rank_raised(world: World) -> None:
    """A rank raises an exception."""
    if process := world.pick_process():
        world.trainer.fail(process, error_type=world.choices.pick(ERROR_TYPES), message="the rank raised")


def rank_hung(world: World) -> None:
    """SIGSTOP of a rank, or a kernel that never ends."""
    if process := world.pick_process():
        world.trainer.hang(process)


def gpu_out_of_memory(world: World) -> None:
    """A batch does not fit into GPU memory."""
    if process := world.pick_process():
        world.trainer.fail(process, error_type="CudaOutOfMemory", message="ran out of GPU memory")


def container_killed(world: World) -> None:
    """SIGKILL of the supervisor."""
    if process := world.pick_process():
        world.trainer.kill(process)


def host_out_of_memory(world: World) -> None:
    """The OOM killer of the kernel kills the supervisor."""
    if process := world.pick_process():
        world.trainer.kill(process, reason="OOMKilled")


def exited_without_result(world: World) -> None:
    """The trainer exits with code 0 in the middle of the training."""
    if process := world.pick_process():
        world.trainer.exit_early(process)


def image_unavailable(world: World) -> None:
    """The image cannot be pulled for a while."""
    world.k8s_nodes.image_available = False

    def restore() -> None:
        world.k8s_nodes.image_available = True

    recover_later(world, restore)


def operator_crashed(world: World) -> None:
    """The process of a running operator dies."""
    for operator in world.operators:
        if operator.is_running:
            world.crash(operator)
            return


def operator_partitioned(world: World) -> None:
    """The newest operator cannot reach the API server for a while."""
    operator = world.operators[-1]
    operator.link.is_partitioned = True

    def reconnect() -> None:
        operator.link.is_partitioned = False

    recover_later(world, reconnect)


def pod_name_taken(world: World) -> None:
    """A stranger creates a pod with the name that the next attempt needs."""
    name = names.pod_name(JOB.name, (world.status.get("attempt") or 0) + 1, 0)
    if world.server.get(Key("Pod", JOB.namespace, name)) is None:
        metadata = {"name": name, "namespace": JOB.namespace}
        world.server.create({"kind": "Pod", "apiVersion": "v1", "metadata": metadata, "spec": {}}, actor="stranger")


def config_map_replaced_by_stranger(world: World) -> None:
    """A ConfigMap of the job is deleted, and a stranger creates one with its name."""
    key = world.config_map_key()
    if world.server.get(key) is not None:
        world.delete(key, {})
        metadata = {"name": key.name, "namespace": key.namespace}
        world.server.create({"kind": "ConfigMap", "apiVersion": "v1", "metadata": metadata}, actor="stranger")


OPERATOR_INCIDENTS: tuple[Incident, ...] = (operator_crashed, annotation_edited, operator_partitioned)

USER_INCIDENTS: tuple[Incident, ...] = (  # frequent ones several times
    *(4 * (suspended_temporarily, pod_deleted)),
    *(2 * (pod_force_deleted, pod_evicted, pod_evicted_by_taint, resumed)),
    suspended,
    resumed_with_other_node_count,
    pod_name_taken,
    config_map_replaced_by_stranger,
    job_deleted,
)

TRAINER_INCIDENTS: tuple[Incident, ...] = (
    *(4 * (container_killed, rank_killed)),
    *(2 * (exited_without_result, image_unavailable, rank_hung, gpu_out_of_memory)),
    rank_raised,
    host_out_of_memory,
)
