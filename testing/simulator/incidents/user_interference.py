"""What people do to what a job needs: its name, its Service, the quota, the machines' room, the operator's clock."""

from datetime import timedelta

from finetune_operator import names
from testing.simulator.incidents.job_incidents import (
    Incident,
    later,
    operator_crashed,
    pod_deleted,
    rank_killed,
    suspended_for_a_while,
)
from testing.simulator.incidents.node_incidents import crowded, machine_lost
from testing.simulator.world.apiserver import Key
from testing.simulator.world.world import JOB, World

CLOCK_ERRORS = (-20.0, 5.0, -20_000.0, 20_000.0)  # seconds


def made_again(world: World) -> None:
    """kubectl delete ftj, and apply at once."""
    if job := world.job:
        world.delete(JOB, {"propagationPolicy": "Background"})
        world.apply(job["spec"])


def quota_spent(world: World) -> None:
    """For a while no more pods than these."""
    world.server.pod_quota = world.choices.pick((1, 0, 2))

    def lift() -> None:
        world.server.pod_quota = None

    later(world, lift)


def service_deleted(world: World) -> None:
    """kubectl delete service."""
    world.delete(Key("Service", JOB.namespace, names.service_name(JOB.name)), {})


def service_edited(world: World) -> None:
    """kubectl edit service: it selects nothing any more."""
    key = Key("Service", JOB.namespace, names.service_name(JOB.name))
    if service := world.server.get(key):
        world.server.change(key, actor="user", spec={**service["spec"], "selector": {"app": "another"}})


def config_map_deleted(world: World) -> None:
    """kubectl delete configmap, of the present attempt."""
    world.delete(Key("ConfigMap", JOB.namespace, names.config_map_name(JOB.name, world.status.get("attempt") or 0)), {})


def relabelled(world: World) -> None:
    """kubectl label, of a pod or the Service: it is not found by its labels any more, or not as what it was."""
    owned = [
        (key, body)
        for kind in ("Pod", "Service")
        for key, body in world.server.all(kind)
        if "labels" in body["metadata"]
    ]
    if owned:
        key, there = world.choices.pick(owned)
        label = world.choices.pick((names.JOB_UID, names.ATTEMPT, names.NODE_RANK, names.MANAGED_BY))
        value = world.choices.pick(("", "another"))
        labels = {**there["metadata"]["labels"], label: value}
        kept = {label: value for label, value in labels.items() if value}
        world.server.change(key, actor="user", metadata={**there["metadata"], "labels": kept})


def pods_refused(world: World) -> None:
    """Kubelets have less room than the scheduler believes, for a while."""
    machines = world.machines.machines[: 1 + world.choices.number(len(world.machines.machines))]

    def refuse(refusing: bool) -> None:
        for machine in machines:
            machine.refuses = refusing

    refuse(True)
    later(world, lambda: refuse(False))


def clock_jumped(world: World) -> None:
    """The clock of an operator's machine is wrong for a while."""
    operator = world.operators[-1]
    seconds = world.choices.pick(CLOCK_ERRORS)
    world.clocks_ahead |= seconds > 0
    operator.clock_error = timedelta(seconds=seconds)

    def mend() -> None:
        operator.clock_error = timedelta()

    later(world, mend)


MEDDLING: tuple[Incident, ...] = (  # the commonest more than once
    *(4 * (made_again, quota_spent)),
    *(
        2
        * (
            service_deleted,
            service_edited,
            config_map_deleted,
            relabelled,
            pods_refused,
            clock_jumped,
            rank_killed,
            suspended_for_a_while,
        )
    ),
    pod_deleted,
    operator_crashed,
    machine_lost,
    crowded,
)
