"""Restores the Service and ConfigMap of an attempt after a user deleted or edited them."""

from datetime import timedelta

from finetune_operator import names
from finetune_operator.core.actions import Action, Create, DeleteService
from finetune_operator.core.job_context import JobContext
from finetune_operator.core.pending_reasons import CONTAINER_CREATING_TIMEOUT
from finetune_operator.observation.pods import NodeObservation
from finetune_operator.plan.config_map import build_config_map, compute_config_hash
from finetune_operator.plan.manifests import build_service
from finetune_operator.plan.run_plan import plan_run


def ensure_service_and_config_map(context: JobContext) -> tuple[Action, ...]:
    """Return the actions that restore the Service and the ConfigMap; an edited Service is deleted first.

    ConfigMaps are not watched, and a kubelet reports a missing ConfigMap only in events. Therefore the ConfigMap is
    created again if a pod waits long for its volumes, which has no effect if the ConfigMap exists (decisions/112).
    """
    if context.observation.edited_service_uid:
        service_name = names.service_name(context.job.metadata.name)
        return (DeleteService(service_name, context.observation.edited_service_uid),)
    config_map_may_be_missing = any(
        duration >= CONTAINER_CREATING_TIMEOUT and not node.ready_to_start
        for node, duration in _find_container_creating_nodes(context)
    )
    if context.observation.service_exists and not config_map_may_be_missing:
        return ()
    run_plan = plan_run(context.job, attempt=context.record.attempt, settings=context.settings)
    # the pods of another release verify its ConfigMap, which must not be replaced by that of this release
    is_reproducible = context.record.config_hash in ("", compute_config_hash(run_plan))
    builders = (
        *(() if context.observation.service_exists else (build_service,)),
        *((build_config_map,) if config_map_may_be_missing and is_reproducible else ()),
    )
    return tuple(Create(build(run_plan)) for build in builders)


def compute_config_map_check_delay(context: JobContext) -> timedelta | None:
    """Return the delay until the next check for a missing ConfigMap, while pods wait for their volumes."""
    creating_nodes = _find_container_creating_nodes(context)
    first_delays = [
        CONTAINER_CREATING_TIMEOUT - duration for _, duration in creating_nodes if duration < CONTAINER_CREATING_TIMEOUT
    ]
    repeated_delays = [
        CONTAINER_CREATING_TIMEOUT
        for node, duration in creating_nodes
        if duration >= CONTAINER_CREATING_TIMEOUT and not node.ready_to_start
    ]
    return min((*first_delays, *repeated_delays), default=None)


def _find_container_creating_nodes(context: JobContext) -> list[tuple[NodeObservation, timedelta]]:
    durations = ((node, node.get_container_creating_duration(context.now)) for node in context.nodes)
    return [(node, duration) for node, duration in durations if duration is not None]
