"""What an attempt needs besides pods, whatever people do to it: a Service that names them, a ConfigMap to mount."""

from datetime import timedelta

from finetune_operator.actions import Action, Create, DeleteService
from finetune_operator.case import Case
from finetune_operator.manifests import build_config_map, build_service
from finetune_operator.observe import Life, NodeObservation
from finetune_operator.plan import plan_run

MOUNT_PATIENCE = timedelta(seconds=60)


def keep_up(case: Case) -> tuple[Action, ...]:
    """Make again what was deleted; a Service that was edited first has to go.

    Nobody watches ConfigMaps, and a kubelet tells only in events that one is missing. So it is made again, which
    changes nothing if it is there, for a pod that has a machine and neither starts nor says why.
    """
    run = plan_run(case.job, attempt=case.record.attempt, settings=case.settings)
    if case.seen.edited_service:
        return (DeleteService(run.service_name, case.seen.edited_service),)
    service = () if case.seen.service_exists else (Create(build_service(run)),)
    stuck = any(_time_to_mount(case, node) <= timedelta() for node in _mounting(case))
    return (*service, Create(build_config_map(run))) if stuck else service


def next_look(case: Case) -> timedelta | None:
    """When a pod may have waited too long for what it mounts."""
    left = (_time_to_mount(case, node) for node in _mounting(case))
    return min((time if time > timedelta() else MOUNT_PATIENCE for time in left), default=None)


def _mounting(case: Case) -> list[NodeObservation]:
    """Nodes that were given a machine, and are not known to wait for anything else."""
    return [node for node in case.nodes if node.life is Life.PENDING and node.placed_at and node.waiting is None]


def _time_to_mount(case: Case, node: NodeObservation) -> timedelta:
    assert node.placed_at is not None
    return node.placed_at + MOUNT_PATIENCE - case.now
