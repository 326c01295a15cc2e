"""Decides what schedules the pods of a job as a group, and checks that the pods belong to that group."""

from datetime import timedelta

from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.scheduling import SchedulingProvider, SchedulingStatus
from finetune_api.v1alpha1.status import AttemptState
from finetune_operator import names
from finetune_operator.core.actions import Action, DeletePodGroup
from finetune_operator.core.decision import Decision, build_decision, require_confirmation
from finetune_operator.core.job_context import JobContext
from finetune_operator.core.provider_choice import choose_provider
from finetune_operator.core.stop_attempt import StopReason, begin_stopping, end_attempt
from finetune_operator.failures.verdict import Verdict
from finetune_operator.observation.pods import PodPhase

# Limits of the time between two reads of what a group waits for, because neither providers nor Workloads are watched.
GROUP_INTERVAL, MAX_GROUP_INTERVAL = timedelta(seconds=15), timedelta(minutes=5)
TIME_PER_POSITION = timedelta(seconds=1)
SHARE_OF_WAIT = 0.1


def record_provider(context: JobContext) -> Decision | None:
    """Record the provider of an attempt that waits for one; None if the cluster has none or was not examined."""
    apis = context.observation.group_apis
    choice = None if apis is None else choose_provider(context.job.spec, apis)
    if not isinstance(choice, SchedulingStatus):
        return None
    return build_decision(context, context.status.model_copy(update={"scheduling": choice}))


def waits_for_provider(context: JobContext) -> bool:
    """Return whether no pod may be created yet, because nothing schedules the pods as a group."""
    is_needed = context.job.spec.scheduling is not None and context.settings.on_cluster
    return is_needed and context.status.scheduling is None


def check_group(context: JobContext) -> Decision | None:
    """Stop an attempt whose pods are not scheduled as the group that its provider would start."""
    scheduling = context.status.scheduling
    if scheduling is None:
        return None
    if scheduling.provider == SchedulingProvider.KUEUE:
        return _check_queue_group(context, scheduling)
    return _check_pod_group(context, scheduling)


def compute_group_delay(context: JobContext) -> timedelta | None:
    """Return when to read again what the pods wait for; None if they do not wait for a provider or for Kueue.

    With many waiting jobs, the requests for the last ones would exceed those for all others. What is displayed of a
    job in a queue may therefore be older if many jobs are ahead of it, or if it has waited for long (decisions/137).
    """
    observation = context.observation
    if observation.group_apis is not None:
        return GROUP_INTERVAL
    if not observation.waits_for_queue:
        return None
    position = observation.workload.position if observation.workload else None
    waited = context.now - (context.record.pending_since or context.now)
    delay = max(SHARE_OF_WAIT * waited, (position or 0) * TIME_PER_POSITION, GROUP_INTERVAL)
    return min(delay, MAX_GROUP_INTERVAL)


def _check_queue_group(context: JobContext, scheduling: SchedulingStatus) -> Decision | None:
    """Fail a job whose pods start without Kueue, its provider, and delete a Workload that cannot admit its pods."""
    # the Workload of the pods of an earlier attempt would never admit those of this one
    if (workload := context.observation.workload) is not None and workload.is_finished:
        return build_decision(context, context.status, actions=context.delete_workload(), requeue_after=GROUP_INTERVAL)
    unmanaged = [node for node in context.nodes if node.phase is not PodPhase.GONE and not node.is_managed_by_kueue]
    if not unmanaged:
        return None
    message = (
        f"pod {unmanaged[0].pod_name} is not managed by Kueue, so that LocalQueue {scheduling.queue_name} is ignored"
    )
    return end_attempt(context, Verdict(Reason.QUEUE_IGNORED, message), context.record)


def _check_pod_group(context: JobContext, scheduling: SchedulingStatus) -> Decision | None:
    """Stop a starting attempt, without a failure, if its group can never have all its pods."""
    if context.record.state is not AttemptState.STARTING:
        return None
    nodes = [node for node in context.nodes if node.phase is not PodPhase.GONE]
    # the API server may have switched its feature gate off after the provider was chosen
    outside = [node.pod_name for node in nodes if not node.is_in_pod_group]
    if scheduling.provider == SchedulingProvider.POD_GROUP and outside and any(not node.is_scheduled for node in nodes):
        message = f"the API server dropped spec.schedulingGroup of pod {outside[0]} (feature gate GenericWorkload)"
        return begin_stopping(context, StopReason.INCOMPLETE, message=message)
    # a scheduler places the first pod of a group after the last one was created
    num_known_nodes = len(context.nodes) + len(context.find_expected_pods())
    was_placed = any(node.is_scheduled for node in nodes) and not context.observation.rejected_creates
    if was_placed and not context.record.created and num_known_nodes < context.job.num_attempt_nodes:
        message = "a pod was deleted after the scheduler had placed all pods, and before the operator recorded them"
        return require_confirmation(context, begin_stopping(context, StopReason.INCOMPLETE, message=message))
    return None


def delete_earlier_pod_groups(context: JobContext) -> tuple[Action, ...]:
    """Return the deletion of the PodGroups that earlier attempts may have left, if the provider has PodGroups.

    The last attempt with all pods has deleted those before it; the attempts after it may have ended without doing so.
    """
    scheduling, metadata = context.status.scheduling, context.job.metadata
    if scheduling is None or scheduling.provider == SchedulingProvider.KUEUE:
        return ()
    earlier = context.status.attempts[:-1]
    first = max((index for index, record in enumerate(earlier) if record.created), default=0)
    group_names = (names.pod_group_name(metadata.name, metadata.uid, record.attempt) for record in earlier[first:])
    return tuple(DeletePodGroup(name, scheduling.api_version) for name in group_names)
