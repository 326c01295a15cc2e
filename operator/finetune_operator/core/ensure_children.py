"""What an attempt needs besides pods, whatever people do to it: a Service that names them, a ConfigMap to mount."""

from datetime import timedelta

from finetune_operator import names
from finetune_operator.core.actions import Action, Create, DeleteService
from finetune_operator.core.job_context import Case
from finetune_operator.core.pending import MAKING_PATIENCE
from finetune_operator.observation.pods import NodeObservation
from finetune_operator.plan.manifests import build_config_map, build_service
from finetune_operator.plan.run_plan import plan_run


def keep_up(case: Case) -> tuple[Action, ...]:
    """Make again what was deleted; a Service that was edited first has to go.

    Nobody watches ConfigMaps, and a kubelet tells only in events that one is missing. So it is made again, which
    changes nothing if it is there, for a pod whose volumes take long.
    """
    if case.seen.edited_service:
        return (DeleteService(names.service_name(case.job.metadata.name), case.seen.edited_service),)
    late = any(time >= MAKING_PATIENCE and not node.ready_to_start for node, time in _being_made(case))
    missing = (*(() if case.seen.service_exists else (build_service,)), *((build_config_map,) if late else ()))
    if not missing:
        return ()
    run = plan_run(case.job, attempt=case.record.attempt, settings=case.settings)
    return tuple(Create(build(run)) for build in missing)


def next_look(case: Case) -> timedelta | None:
    """When a pod that is being made has taken long, and then as often, for as long as it may miss something."""
    made = _being_made(case)
    due = [MAKING_PATIENCE - time for _, time in made if time < MAKING_PATIENCE]
    again = [MAKING_PATIENCE for node, time in made if time >= MAKING_PATIENCE and not node.ready_to_start]
    return min((*due, *again), default=None)


def _being_made(case: Case) -> list[tuple[NodeObservation, timedelta]]:
    times = ((node, node.being_made_for(case.now)) for node in case.nodes)
    return [(node, time) for node, time in times if time is not None]
