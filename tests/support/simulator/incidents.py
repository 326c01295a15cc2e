"""What users, machines and trainers do to a job, each at a time of its own."""

import asyncio
from collections.abc import Callable

from support.simulator.apiserver import Key
from support.simulator.world import JOB, World

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
        world.machines.disrupt(picked[0], "EvictionByEvictionAPI")


def pod_tainted_away(world: World) -> None:
    """Somebody taints a machine whose kubelet is well."""
    if picked := world.pick_pod():
        world.machines.disrupt(picked[0], "DeletionByTaintManager")


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


def machine_lost(world: World) -> None:
    """A kubelet dies, and comes back."""
    machine = world.pick_machine()
    world.note(f"{machine.name} is lost")
    world.machines.lose(machine)
    later(world, lambda: world.machines.find(machine))


def machine_lost_for_ever(world: World) -> None:
    """A kubelet dies."""
    machine = world.pick_machine()
    world.note(f"{machine.name} is lost for ever")
    world.machines.lose(machine)


def machine_without_power(world: World) -> None:
    """A machine and all that runs on it are gone, and nobody tells."""
    machine = world.pick_machine()
    world.note(f"{machine.name} has no power")
    world.machines.lose(machine)
    for process, place in world.machines.processes.values():
        if place is machine:
            world.trainer.kill(process)


def rank_killed(world: World) -> None:
    """SIGKILL of a rank; its supervisor tells."""
    if process := world.pick_process():
        world.trainer.fail(process, error_type="RankKilled", message="a rank was killed", signal=9)


def rank_raised(world: World) -> None:
    """An exception, foreseen or not."""
    if process := world.pick_process():
        world.trainer.fail(process, error_type=world.choices.pick(CRASHES), message="it went wrong")


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


def no_room(world: World) -> None:
    """Nothing can be scheduled for a while."""
    world.machines.room = False

    def make_room() -> None:
        world.machines.room = True

    later(world, make_room)


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
    name = f"{JOB.name}-{(world.status.get('attempt') or 0) + 1}-0"
    manifest = {"kind": "Pod", "apiVersion": "v1", "metadata": {"name": name, "namespace": JOB.namespace}}
    if world.server.get(Key("Pod", JOB.namespace, name)) is None:
        world.server.create({**manifest, "spec": {}}, actor="stranger")


OPERATOR_INCIDENTS: tuple[Incident, ...] = (operator_crashed, touched, operator_cut_off)

INCIDENTS: tuple[Incident, ...] = (  # the commonest more than once
    *(4 * (container_killed, rank_killed, pod_deleted, machine_lost, suspended_for_a_while, operator_crashed)),
    *(2 * (touched, pod_deleted_by_force, pod_evicted, pod_tainted_away, machine_without_power, resumed)),
    *(2 * (left_without_result, no_room, no_image, operator_cut_off)),
    suspended,
    resumed_with_another_size,
    machine_lost_for_ever,
    rank_raised,
    out_of_memory,
    name_taken,
    job_deleted,
)
