"""What happens to machines: they are lost, come back, break, or are full of other people's pods."""

from testing.simulator.incidents.job_incidents import Incident, later
from testing.simulator.world.kubernetes_nodes import Machine
from testing.simulator.world.world import World


def machine_lost(world: World) -> None:
    """A kubelet dies, and comes back; what runs there runs on."""
    machine = _pick(world, "is lost")
    world.nodes.lose(machine)
    later(world, lambda: world.nodes.find(machine))


def machine_lost_for_ever(world: World) -> None:
    """A kubelet dies."""
    world.nodes.lose(_pick(world, "is lost for ever"))


def machine_without_power(world: World) -> None:
    """A machine and all that runs on it are gone, and nobody tells."""
    machine = _pick(world, "has no power")
    world.nodes.lose(machine)
    _end_processes(world, machine)


def machine_cut_off(world: World) -> None:
    """A switch fails: neither the API server nor the other ranks hear of it for a while."""
    machine = _pick(world, "is cut off")
    world.nodes.cut_off(machine)
    links = [world.trainer.cut_off(process) for process in world.machines.processes_on(machine)]

    def mend() -> None:
        world.nodes.find(machine)
        for link in links:
            link()

    later(world, mend)


def machine_taken_back(world: World) -> None:
    """A cloud takes a machine away, and says so."""
    machine = _pick(world, "is taken back")
    world.nodes.lose(machine)
    _end_processes(world, machine)
    world.nodes.delete_node(machine)


def node_deleted(world: World) -> None:
    """kubectl delete node, of a machine that is well or long lost."""
    machine = _pick(world, "is deleted")
    if world.choices.chance(50):
        world.nodes.lose(machine)
    world.nodes.delete_node(machine)
    later(world, lambda: world.nodes.find(machine))


def machine_out_of_service(world: World) -> None:
    """Lost, and tainted as out of service, though it may come back."""
    machine = _pick(world, "is out of service")
    world.nodes.lose(machine)
    world.nodes.take_out_of_service(machine)
    later(world, lambda: world.nodes.find(machine))


def machine_broken(world: World) -> None:
    """A GPU fails all that runs on it; one such machine is enough."""
    if not any(machine.broken for machine in world.machines.machines):
        world.machines.break_gpu(_pick(world, "has a broken GPU"))


def no_room(world: World) -> None:
    """Nothing can be scheduled for a while."""
    world.machines.room = False

    def make_room() -> None:
        world.machines.room = True

    later(world, make_room)


def crowded(world: World) -> None:
    """Other people's pods take all machines but one or two, for a while."""
    machines = world.machines.machines
    free = {machines[world.choices.number(len(machines))].name for _ in range(2)}
    taken = [machine for machine in machines if machine.name not in free]

    def take(taking: bool) -> None:
        for machine in taken:
            machine.taken = taking

    take(True)
    later(world, lambda: take(False))


def _pick(world: World, what: str) -> Machine:
    machine = world.pick_machine()
    world.note(f"{machine.name} {what}")
    return machine


def _end_processes(world: World, machine: Machine) -> None:
    for process in world.machines.processes_on(machine):
        world.trainer.kill(process, reason="ContainerStatusUnknown")  # as a kubelet says that starts again


LOSSES: tuple[Incident, ...] = (
    *(3 * (machine_lost, machine_lost_for_ever, machine_without_power)),
    *(2 * (machine_taken_back, machine_out_of_service, node_deleted)),
)

MACHINE_INCIDENTS: tuple[Incident, ...] = (  # the commonest more than once
    *LOSSES,
    *(2 * (machine_cut_off, no_room, crowded)),
    machine_broken,
)
