"""Incidents caused by user changes to the Service, ConfigMap, labels or quota of a job, and by clock jumps."""

from datetime import timedelta

from finetune_operator import names
from finetune_operator.observation.ownership import get_controller_uid
from testing.simulator.incidents.job_incidents import (
    Incident,
    crash_operator,
    delete_pod,
    kill_rank,
    recover_later,
    suspend_job_temporarily,
)
from testing.simulator.incidents.node_incidents import occupy_k8s_nodes, stop_kubelet_temporarily
from testing.simulator.world.job import SimulatedJob
from testing.simulator.world.world import World

CLOCK_OFFSETS_SECONDS = (-20.0, 5.0, -20_000.0, 20_000.0)


def recreate_job(world: World, job: SimulatedJob) -> None:
    """Delete the job and create it again immediately."""
    if body := job.body:
        world.delete(job.key, {"propagationPolicy": "Background"})
        job.create(body["spec"])


def exhaust_quota(world: World, job: SimulatedJob) -> None:
    """Temporarily set a ResourceQuota that allows fewer pods than the job needs."""
    world.server.pod_quotas[job.key.namespace] = world.choices.pick((1, 0, 2))

    def remove_quota() -> None:
        world.server.pod_quotas.pop(job.key.namespace, None)

    recover_later(world, remove_quota)


def delete_service(world: World, job: SimulatedJob) -> None:
    """Delete the Service of the job."""
    world.delete(job.service_key, {})


def edit_service(world: World, job: SimulatedJob) -> None:
    """Edit the Service so that its selector no longer matches any pod."""
    key = job.service_key
    if service := world.server.get(key):
        world.server.replace_fields(key, actor="user", spec={**service["spec"], "selector": {"app": "another"}})


def delete_config_map(world: World, job: SimulatedJob) -> None:
    """Delete the ConfigMap of the current attempt."""
    world.delete(job.get_config_map_key(), {})


def edit_labels(world: World, job: SimulatedJob) -> None:
    """Change labels of a pod or of the Service, so that label selectors miss it or match it by mistake."""
    labelled_objects = [
        (key, body)
        for kind in ("Pod", "Service")
        for key, body in world.server.list_objects(kind)
        if "labels" in body["metadata"] and get_controller_uid(body) in job.uids
    ]
    if labelled_objects:
        key, existing = world.choices.pick(labelled_objects)
        label = world.choices.pick((names.JOB_UID, names.ATTEMPT, names.NODE_RANK, names.MANAGED_BY))
        value = world.choices.pick(("", "another"))
        labels = {**existing["metadata"]["labels"], label: value}
        nonempty_labels = {label: value for label, value in labels.items() if value}
        world.server.replace_fields(key, actor="user", metadata={**existing["metadata"], "labels": nonempty_labels})


def reject_pods_in_kubelets(world: World, job: SimulatedJob) -> None:
    """Temporarily give kubelets fewer free resources than the scheduler assumes."""
    k8s_nodes = world.k8s_nodes.nodes[: 1 + world.choices.draw_number(len(world.k8s_nodes.nodes))]

    def set_rejecting(rejecting: bool) -> None:
        for k8s_node in k8s_nodes:
            k8s_node.rejects_pods = rejecting

    set_rejecting(True)
    recover_later(world, lambda: set_rejecting(False))


def shift_operator_clock(world: World, job: SimulatedJob) -> None:
    """Temporarily shift the clock of an operator."""
    operator = world.operators[-1]
    seconds = world.choices.pick(CLOCK_OFFSETS_SECONDS)
    world.operator_clock_was_ahead |= seconds > 0
    operator.manager.clock_offset = timedelta(seconds=seconds)

    def correct_clock() -> None:
        operator.manager.clock_offset = timedelta()

    recover_later(world, correct_clock)


USER_INTERFERENCE: tuple[Incident, ...] = (  # an incident that is listed several times is drawn more often
    *(4 * (recreate_job, exhaust_quota)),
    *(
        2
        * (
            delete_service,
            edit_service,
            delete_config_map,
            edit_labels,
            reject_pods_in_kubelets,
            shift_operator_clock,
            kill_rank,
            suspend_job_temporarily,
        )
    ),
    delete_pod,
    crash_operator,
    stop_kubelet_temporarily,
    occupy_k8s_nodes,
)
