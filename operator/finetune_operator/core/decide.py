"""decide: job, what is seen of its children and the time -> the status to write and what to do. Pure and total.

An attempt goes Starting -> Running -> Stopping -> Failed, Stopped or Succeeded. One pass makes one step; what it writes
is all that the next pass needs, so that a crash between any two API calls repeats nothing and loses nothing.
"""

from datetime import datetime, timedelta

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import AttemptRecord, AttemptState
from finetune_operator import names
from finetune_operator.core.actions import Action, Create, DeleteConfigMap, DeleteJob, Emit
from finetune_operator.core.ensure_children import keep_up, next_look
from finetune_operator.core.job_context import Case, Decision, confirmed, with_next, with_record, write
from finetune_operator.core.pending import refused_for_good
from finetune_operator.core.stop_attempt import (
    ABORT_GRACE_SECONDS,
    StopReason,
    begin_to_stop,
    complete,
    end_attempt,
    next_attempt,
    stop,
)
from finetune_operator.failures.rules import judge_node
from finetune_operator.observation.pods import Life, NodeObservation, Observation
from finetune_operator.plan.manifests import build_children
from finetune_operator.plan.run_plan import Settings, plan_run

LOOK_AGAIN = timedelta(seconds=5)
SHORTEST_PATIENCE, LONGEST_PATIENCE = timedelta(seconds=1), timedelta(seconds=15)


def decide(job: FineTuneJob, seen: Observation, now: datetime, settings: Settings) -> Decision:
    """The next step of a job. Equal input gives equal output; deciding again after acting changes nothing."""
    case = Case(job, seen, now, settings)
    if job.metadata.deletion_timestamp is not None:
        return Decision(job.status)
    if job.status.completion_time is not None:
        return _after_the_end(case)
    if not job.status.attempts:
        return _suspend_before_start(case) if job.spec.suspend else _start(case)
    match case.record.state:
        case AttemptState.STARTING | AttemptState.RUNNING:
            return _carry_on(case)
        case AttemptState.STOPPING:
            return stop(case)
        case AttemptState.STOPPED:
            return _stay_suspended(case) if job.spec.suspend else _resume(case)
        case AttemptState.SUCCEEDED | AttemptState.FAILED:
            raise AssertionError("an attempt that ended is followed by another or by the job's end in the same write")


def _start(case: Case) -> Decision:
    record = AttemptRecord(attempt=0, state=AttemptState.STARTING, start_time=case.now, pending_since=case.now)
    status = case.status.model_copy(update={"start_time": case.now, "suspend_time": None})
    return write(case, with_next(status, record, case.now))


def _suspend_before_start(case: Case) -> Decision:
    return write(case, case.status.model_copy(update={"suspend_time": case.status.suspend_time or case.now}))


def _carry_on(case: Case) -> Decision:
    """Starting or Running: look for an end first, then for what is still to be made."""
    for look in (
        _asked_to_stop,
        _refusal,
        _success,
        _left_alone,
        _failure,
        _late_start,
        _still_to_be_made,
        _stalled_start,
    ):
        decision = look(case)
        if decision is not None:
            return decision
    return _running_or_waiting(case)


def _asked_to_stop(case: Case) -> Decision | None:
    if case.job.spec.suspend:
        return begin_to_stop(case, StopReason.SUSPENDED)
    if case.deadline is not None and case.now >= case.deadline:
        return begin_to_stop(case, StopReason.DEADLINE)
    return None


def _refusal(case: Case) -> Decision | None:
    """The API server will never take what the spec asks for, or a foreign object has the name."""
    verdict = refused_for_good(case.job, case.seen)
    return end_attempt(case, verdict, case.record) if verdict else None


def _success(case: Case) -> Decision | None:
    nodes = case.nodes
    if len(nodes) < case.job.spec.num_nodes or not all(node.succeeded for node in nodes):
        return None
    return complete(case, case.record)


def _left_alone(case: Case) -> Decision | None:
    """Nodes that gave up waiting for others that cannot start; nothing has failed."""
    wait = case.wait
    if wait is None or not wait.for_ever:
        return None
    bad = [node for node in case.nodes if node.life not in (Life.PENDING, Life.RUNNING)]
    if not bad or not all(node.life is Life.FAILED and judge_node(node.evidence).victim for node in bad):
        return None
    return begin_to_stop(
        case, StopReason.INCOMPLETE, message=f"nodes that ran gave up waiting for others: {wait.message}"
    )


def _failure(case: Case) -> Decision | None:
    """A node ended badly, is being deleted or was hidden by somebody else, or is missing although it was made."""
    bad = [node for node in case.nodes if not node.succeeded]
    if any(node.restarted or node.life in (Life.FAILED, Life.SUCCEEDED) for node in bad):
        return begin_to_stop(case, StopReason.NODE_FAILED)
    if any(node.hidden or (node.deleting and node.life is not Life.GONE) for node in bad):
        return begin_to_stop(case, StopReason.NODE_DELETED)
    missing = case.record.created and len(case.nodes) < case.job.spec.num_nodes
    if missing or any(node.life is Life.GONE for node in bad):  # a name is never used twice
        return confirmed(case, begin_to_stop(case, StopReason.NODE_FAILED))
    return None


def _still_to_be_made(case: Case) -> Decision | None:
    """Create what is missing, once no older attempt can run and the time of a delayed restart has come."""
    record = case.record
    if record.created:
        return None
    older = _older(case)
    blockers = [node for node in older if node.may_run(case.now)]
    if blockers:
        return write(case, case.status, actions=case.deletions(blockers, ABORT_GRACE_SECONDS), look_again=LOOK_AGAIN)
    if (delay := _delay(record, case.now)) > timedelta():
        return write(case, case.status, look_again=delay)
    existing = {node.pod_name for node in case.nodes if node.life is not Life.GONE}
    if len(existing) == case.job.spec.num_nodes and case.seen.service_exists:
        return None
    children = build_children(plan_run(case.job, attempt=record.attempt, settings=case.settings))
    missing = (m for m in children if m["metadata"]["name"] not in existing)
    actions: tuple[Action, ...] = tuple(
        Create(m) for m in missing if m["kind"] != "Service" or not case.seen.service_exists
    )
    if case.seen.edited_service:
        actions = (*actions, *keep_up(case))
    if record.attempt > 0:
        previous = names.config_map_name(case.job.metadata.name, record.attempt - 1)
        actions = (*actions, DeleteConfigMap(previous), *case.deletions(older, ABORT_GRACE_SECONDS))
    # a cache may not show a pod of an older attempt, nor one that the last pass made
    return confirmed(case, write(case, case.status, actions=actions, look_again=_patience(case)))


def _delay(record: AttemptRecord, now: datetime) -> timedelta:
    """What is left of the attempt's; none where the clock that it was written by was wrong, or is."""
    if record.not_before is None or (record.start_time and now < record.start_time):
        return timedelta()
    return record.not_before - now


def _patience(case: Case) -> timedelta | None:
    """When what was refused is tried again: soon at first, then after as long as it was waited for."""
    if not case.seen.refusals:
        return None
    waited = case.now - case.status.waiting.since if case.status.waiting else SHORTEST_PATIENCE
    return min(LONGEST_PATIENCE, max(SHORTEST_PATIENCE, waited))


def _stalled_start(case: Case) -> Decision | None:
    """An image that cannot be had for ten minutes will not come, nor will a container that no kubelet can make."""
    told = case.status.waiting
    ends = case.patience_ends(told)
    if told is None or ends is None or case.now < ends:
        return None
    if (wait := case.wait) and wait.verdict is not None:
        return end_attempt(case, wait.verdict, case.record)
    return begin_to_stop(case, StopReason.IMAGE, message=told.message)


def _late_start(case: Case) -> Decision | None:
    """Nodes that do not all start in time: the job ends, or at least none holds a machine while it waits for others."""
    told = case.status.waiting
    if case.pending_deadline is not None and case.now >= case.pending_deadline:
        waited_for = f": {told.message}" if told else ""
        limit = case.job.spec.pending_deadline_seconds
        return begin_to_stop(
            case,
            StopReason.PENDING,
            message=f"not all nodes ran within pendingDeadlineSeconds ({limit} s){waited_for}",
        )
    release = case.release_time
    if release is None or case.now < release or told is None:
        return None
    limit = case.job.spec.startup_deadline_seconds
    message = (
        f"released after startupDeadlineSeconds ({limit} s), so that no node holds its machine idle: {told.message}"
    )
    return begin_to_stop(case, StopReason.INCOMPLETE, message=message)


def _running_or_waiting(case: Case) -> Decision:
    record = case.record
    live = [node for node in case.nodes if node.life is not Life.GONE]
    created = record.created or (len(live) == case.job.spec.num_nodes and case.seen.service_exists)
    runs = created and all(node.life is Life.RUNNING or node.succeeded for node in case.nodes)
    started = record.state is AttemptState.RUNNING or runs
    update = {
        "created": created,
        "state": AttemptState.RUNNING if started else AttemptState.STARTING,
        "running_time": record.running_time or (case.now if started else None),
    }
    record = record.model_copy(update={**update, **case.steps})
    older = case.deletions(_older(case), ABORT_GRACE_SECONDS)
    actions = (*_start_events(case, record), *older, *keep_up(case))
    times = (next_look(case), None if started else _patience(case))
    look_again = min((time for time in times if time is not None), default=None)
    return write(case, with_record(case.status, record), actions=actions, look_again=look_again)


def _start_events(case: Case, record: AttemptRecord) -> tuple[Action, ...]:
    """What is worth an event on the way to Running: that it runs, and what it waits for, once each."""
    if record.state is AttemptState.RUNNING:
        if case.record.state is AttemptState.RUNNING:
            return ()
        message = f"attempt {record.attempt} runs on {case.job.spec.num_nodes} nodes"
        return (Emit("Normal", Reason.RUNNING, message, f"running-{record.attempt}"),)
    wait, told = case.wait, case.status.waiting
    if wait is not None and (told is None or told.reason != wait.reason):
        return (
            Emit(
                "Normal" if wait.usual else "Warning",
                wait.reason,
                wait.message,
                f"waiting-{record.attempt}-{wait.reason}",
            ),
        )
    return ()


def _older(case: Case) -> list[NodeObservation]:
    return [node for node in case.seen.live() if node.attempt != case.record.attempt]


def _stay_suspended(case: Case) -> Decision:
    """A pod that turns up late is removed."""
    outlived, look_again = case.outlived_pods()
    actions = case.deletions([*case.running_pods(), *outlived], ABORT_GRACE_SECONDS)
    return write(case, case.status, actions=actions, look_again=look_again)


def _resume(case: Case) -> Decision:
    new = next_attempt(case, case.status)
    attempt = new.attempt
    paused = max(0, (case.now - case.status.suspend_time).total_seconds()) if case.status.suspend_time else 0
    status = with_next(case.status, new, case.now).model_copy(
        update={"suspended_seconds": case.status.suspended_seconds + round(paused), "suspend_time": None}
    )
    return write(
        case, status, actions=(Emit("Normal", Reason.RESUMED, f"attempt {attempt} starts", f"resumed-{attempt}"),)
    )


def _after_the_end(case: Case) -> Decision:
    """Complete or Failed for good: the status stays, whatever still runs is stopped, and TTL removes the job."""
    outlived, look_again = case.outlived_pods()
    actions = case.deletions([*case.running_pods(), *outlived], ABORT_GRACE_SECONDS)
    ttl, ended = case.job.spec.ttl_seconds_after_finished, case.status.completion_time
    if ttl is None or ended is None:
        return Decision(case.status, actions, requeue_after=look_again)
    left = ended + timedelta(seconds=ttl) - case.now
    if left > timedelta():
        return Decision(case.status, actions, requeue_after=min(left, look_again or left))
    return Decision(case.status, (*actions, DeleteJob(case.job.metadata.uid)))
