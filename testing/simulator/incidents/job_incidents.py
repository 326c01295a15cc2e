"""What users and trainers do to a job, each at a time of its own; accidents.py has what machines do."""

import asyncio
from collections.abc import Callable

from finetune_operator import names
from testing.simulator.world.apiserver import Key
from testing.simulator.world.world import JOB, World

AWAY = (10.0, 100.0, 400.0)
CRASHES = ("RuntimeError", "CudaError", "NonFiniteLoss")

Incident = Callable[[World], None]


def later(world: World, act: Callable[[], None]) -> None:
    """After some time, or when the faults end."""

    def once() -> None:
        if act in world.to_mend:
            world.to_mend.remove(act)
            act()

    world.to_mend.append(act)
    asyncio.get_running_loop().call_later(world.choices.pick(AWAY), once)


def pod_deleted(world: World) -> None:
    """kubectl delete pod."""
    if picked := world.pick_pod():
        world.delete(picked[0], {})


def pod_deleted_by_force(world: World) -> None:
    """kubectl delete pod --force: the object is gone at once, its processes are not."""
    if picked := world.pick_pod():
        world.delete(picked[0], {"gracePeriodSeconds": 0})


def pod_evicted(world: World) -> None:
    """kubectl drain."""
    if picked := world.pick_pod():
        world.nodes.disrupt(picked[0], "EvictionByEvictionAPI")


def pod_tainted_away(world: World) -> None:
    """Somebody taints a machine whose kubelet is well."""
    if picked := world.pick_pod():
        world.nodes.disrupt(picked[0], "DeletionByTaintManager")


def suspended(world: World) -> None:
    """spec.suspend: true."""
    world.edit_spec(suspend=True)


def suspended_for_a_while(world: World) -> None:
    """And false again."""
    world.edit_spec(suspend=True)
    later(world, lambda: world.edit_spec(suspend=False))


def resumed_with_another_size(world: World) -> None:
    """Suspended, and resumed with more or fewer nodes."""
    world.edit_spec(suspend=True)
    world.edit_spec(numNodes=world.choices.pick((1, 2, 3)))
    later(world, lambda: world.edit_spec(suspend=False))


def resumed(world: World) -> None:
    """spec.suspend: false."""
    world.edit_spec(suspend=False)


def touched(world: World) -> None:
    """An annotation is changed."""
    world.touch()


def job_deleted(world: World) -> None:
    """kubectl delete ftj, in one of its manners."""
    world.delete(JOB, {"propagationPolicy": world.choices.pick(("Background", "Foreground"))})


def rank_killed(world: World) -> None:
    """SIGKILL of a rank; its supervisor tells."""
    if process := world.pick_process():
        world.trainer.fail(process, error_type="RankKilled", message="a rank was killed", signal=9)


def rank_raised(world: World) -> None:
    """An exception, foreseen or not."""
    if process := world.pick_process():
        world.trainer.fail(process, error_type=world.choices.pick(CRASHES), message="it went wrong")


def rank_hung(world: World) -> None:
    """SIGSTOP of a rank, or a kernel that spins."""
    if process := world.pick_process():
        world.trainer.hang(process)


def gpu_out_of_memory(world: World) -> None:
    """A batch was too large."""
    if process := world.pick_process():
        world.trainer.fail(process, error_type="CudaOutOfMemory", message="ran out of GPU memory")


def container_killed(world: World) -> None:
    """SIGKILL of the supervisor."""
    if process := world.pick_process():
        world.trainer.kill(process)


def out_of_memory(world: World) -> None:
    """The kernel's killer."""
    if process := world.pick_process():
        world.trainer.kill(process, reason="OOMKilled")


def left_without_result(world: World) -> None:
    """Exit 0 in the middle."""
    if process := world.pick_process():
        world.trainer.exit_early(process)


def no_image(world: World) -> None:
    """The image cannot be pulled for a while."""
    world.machines.image = False

    def push() -> None:
        world.machines.image = True

    later(world, push)


def operator_crashed(world: World) -> None:
    """Out of the blue."""
    for operator in world.operators:
        if operator.alive:
            world.crash(operator)
            return


def operator_cut_off(world: World) -> None:
    """Nothing gets through in either direction."""
    operator = world.operators[-1]
    operator.link.cut = True

    def mend() -> None:
        operator.link.cut = False

    later(world, mend)


def name_taken(world: World) -> None:
    """Somebody else has a pod of the name that the next attempt needs."""
    name = names.pod_name(JOB.name, (world.status.get("attempt") or 0) + 1, 0)
    if world.server.get(Key("Pod", JOB.namespace, name)) is None:
        metadata = {"name": name, "namespace": JOB.namespace}
        world.server.create({"kind": "Pod", "apiVersion": "v1", "metadata": metadata, "spec": {}}, actor="stranger")


def config_map_replaced(world: World) -> None:
    """Somebody else's ConfigMap has the name of one that was the job's."""
    key = Key("ConfigMap", JOB.namespace, names.config_map_name(JOB.name, world.status.get("attempt") or 0))
    if world.server.get(key) is not None:
        world.delete(key, {})
        metadata = {"name": key.name, "namespace": key.namespace}
        world.server.create({"kind": "ConfigMap", "apiVersion": "v1", "metadata": metadata}, actor="stranger")


OPERATOR_INCIDENTS: tuple[Incident, ...] = (operator_crashed, touched, operator_cut_off)

USER_INCIDENTS: tuple[Incident, ...] = (  # the commonest more than once
    *(4 * (suspended_for_a_while, pod_deleted)),
    *(2 * (pod_deleted_by_force, pod_evicted, pod_tainted_away, resumed)),
    suspended,
    resumed_with_another_size,
    name_taken,
    config_map_replaced,
    job_deleted,
)

TRAINER_INCIDENTS: tuple[Incident, ...] = (
    *(4 * (container_killed, rank_killed)),
    *(2 * (left_without_result, no_image, rank_hung, gpu_out_of_memory)),
    rank_raised,
    out_of_memory,
)
