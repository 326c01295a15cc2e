"""Property-based tests of decide() with generated statuses and observations, including unreachable ones."""

import os
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finetune_api.termination import Outcome, Termination
from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, Evidence, JobStatus, RestartCounts, WaitStatus
from finetune_operator.core.actions import Create, DeletePod, EmitEvent
from finetune_operator.core.conditions import acknowledge_generation
from finetune_operator.core.decide import decide
from finetune_operator.core.decision import Decision
from finetune_operator.core.stop_attempt import StopReason
from finetune_operator.observation.pods import (
    Claim,
    NodeObservation,
    Observation,
    PodPhase,
    RejectedCreate,
    WaitingState,
)
from testing.builders.jobs import NOW, SETTINGS, job

EXAMPLES = int(os.environ.get("FINETUNE_EXAMPLES", "150"))
MAX_DECISIONS = 8  # maximum number of decisions until the status is stable

fuzzing = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=(HealthCheck.too_slow,))
seconds = st.sampled_from((0, 1, 5, 30, 31, 100, 700, 5000))
moments = st.one_of(st.none(), seconds.map(lambda s: NOW - timedelta(seconds=s)))
ranks = st.integers(0, 2)
attempts = st.integers(0, 3)

evidences = st.builds(
    Evidence,
    node_rank=ranks,
    pod_name=st.just("bert-0-0"),
    ended=st.booleans(),
    reason=st.sampled_from(("", "Error", "OOMKilled", "Evicted", "OutOfcpu", "StartError", "ContainerStatusUnknown")),
    disruption=st.sampled_from(
        ("", "DeletionByTaintManager", "EvictionByEvictionAPI", "WorkloadEvictedDueToPreempted", "SomethingNew")
    ),
    preemptor=st.sampled_from(("", "workload 527a9fa8")),
    deleted=st.booleans(),
    outcome=st.sampled_from(("", *Outcome, "somethingNew")),
    error_type=st.sampled_from(("", "DistBackendError", "RuntimeError", "OutputError", "DnsTimeout")),
    exit_code=st.sampled_from((None, 0, 1, 2, 137, 143)),
    rank=st.sampled_from((None, 0, 3)),
    signal=st.sampled_from((None, 9, 11, 999)),
    message=st.sampled_from(("", "connection closed by peer", "it went wrong")),
    last_step=st.sampled_from((None, 0, 7)),
    finished_at=moments,
)

nodes = st.builds(
    NodeObservation,
    attempt=attempts,
    node_rank=ranks,
    pod_name=st.just("bert-0-0"),
    uid=st.sampled_from(("a", "b", "c")),
    phase=st.sampled_from(PodPhase),
    is_terminating=st.booleans(),
    deletion_deadline=st.one_of(moments, st.just(NOW + timedelta(seconds=90))),
    is_scheduled=st.booleans(),
    waiting=st.sampled_from(
        (
            None,
            *(
                WaitingState(reason, "message")
                for reason in ("Unschedulable", "ErrImagePull", "InvalidImageName", "New")
            ),
        )
    ),
    evidence=evidences,
    termination=st.one_of(st.none(), st.builds(Termination, first_step=st.sampled_from((None, 3)))),
    container_creating_since=moments,
    ready_to_start=st.sampled_from((None, True, False)),
)

rejected_creates = st.builds(
    RejectedCreate,
    kind=st.sampled_from(("Pod", "Service")),
    name=st.just("bert-0-0"),
    status=st.sampled_from((400, 403, 409, 413, 422)),
    message=st.just("no"),
    name_taken=st.booleans(),
    predecessor_terminating=st.booleans(),
)

observations = st.builds(
    Observation,
    nodes=st.lists(nodes, max_size=6).map(tuple),
    service_exists=st.booleans(),
    edited_service_uid=st.sampled_from(("", "d")),
    claims=st.sampled_from((None, (), (Claim("models", ("ReadWriteOnce",)),), (Claim("models", ("ReadWriteMany",)),))),
    rejected_creates=st.lists(rejected_creates, max_size=2).map(tuple),
    is_fresh=st.booleans(),
)

ACTIVE_STATES = (AttemptState.STARTING, AttemptState.RUNNING, AttemptState.STOPPING, AttemptState.STOPPED)


@st.composite
def statuses(draw: st.DrawFn) -> JobStatus:
    """Generate the status of a new, active or finished job."""
    if draw(st.integers(0, 9)) == 0:
        return JobStatus(suspend_time=draw(moments))
    ended = draw(st.booleans()) and draw(st.booleans())
    count = draw(st.integers(1, 3))
    state = draw(st.sampled_from((AttemptState.SUCCEEDED, AttemptState.FAILED) if ended else ACTIVE_STATES))
    records = [AttemptRecord(attempt=n, state=AttemptState.FAILED, end_time=NOW) for n in range(count - 1)]
    last = AttemptRecord(
        attempt=count - 1,
        state=state,
        created=draw(st.booleans()),
        not_before=draw(st.one_of(moments, st.just(NOW + timedelta(seconds=20)))),
        start_time=NOW - timedelta(seconds=60),
        running_time=draw(moments),
        last_step=draw(st.sampled_from((None, 5))),
        reason=draw(st.sampled_from(tuple(StopReason))).value if state is AttemptState.STOPPING else "",
        evidence=draw(st.lists(evidences, max_size=3, unique_by=lambda e: e.node_rank).map(tuple)),
    )
    return JobStatus(
        attempt=count - 1,
        attempts=(*records, last),
        restarts=draw(st.integers(0, 4)),
        without_progress=RestartCounts(counted=draw(st.integers(0, 4)), infrastructure=draw(st.integers(0, 11))),
        start_time=NOW - timedelta(seconds=100),
        completion_time=NOW - timedelta(seconds=draw(seconds)) if ended else None,
        suspend_time=draw(moments),
        waiting=draw(st.one_of(st.none(), st.just(WaitStatus(reason="ImagePullFailed", since=NOW)))),
    )


@st.composite
def jobs(draw: st.DrawFn) -> FineTuneJob:
    """Generate a job with a status."""
    fields: dict[str, Any] = {"numNodes": draw(st.integers(1, 3)), "suspend": draw(st.booleans())}
    if draw(st.integers(0, 4)) == 0:
        fields["cancel"] = True
    for name, values in (("activeDeadlineSeconds", (50, 200)), ("ttlSecondsAfterFinished", (0, 40))):
        value = draw(st.sampled_from((None, *values)))
        if value is not None:
            fields[name] = value
    return job(status=draw(statuses()), deleted=draw(st.integers(0, 9)) == 0, **fields)


def apply_status(job: FineTuneJob, decision: Decision) -> FineTuneJob:
    """Return a copy of the job with the status of the decision."""
    return job.model_copy(update={"status": decision.status})


def select_pod_actions(decision: Decision) -> list[Create | DeletePod]:
    """Return the create actions and the pod deletions of the decision."""
    return [action for action in decision.actions if isinstance(action, Create | DeletePod)]


@fuzzing
@given(jobs(), observations, seconds)
def test_decide_accepts_all_inputs_and_is_deterministic(
    ftjob: FineTuneJob, observation: Observation, elapsed_seconds: int
) -> None:
    now = NOW + timedelta(seconds=elapsed_seconds)

    assert decide(ftjob, observation, now, SETTINGS) == decide(ftjob, observation, now, SETTINGS)


@fuzzing
@given(jobs(), observations)
def test_status_becomes_stable_if_the_observation_does_not_change(ftjob: FineTuneJob, observation: Observation) -> None:
    observation = replace(observation, is_fresh=True)
    for _ in range(MAX_DECISIONS):
        decision = decide(ftjob, observation, NOW, SETTINGS)
        if decision.status == ftjob.status:
            break
        ftjob = apply_status(ftjob, decision)
    following = decide(ftjob, observation, NOW, SETTINGS)

    assert following.status == ftjob.status
    assert not [action for action in following.actions if isinstance(action, EmitEvent)]


@fuzzing
@given(jobs(), observations)
def test_state_change_is_written_before_its_actions_are_executed(ftjob: FineTuneJob, observation: Observation) -> None:
    decision = decide(ftjob, observation, NOW, SETTINGS)
    before, now = ftjob.status.attempts, decision.status.attempts
    if [(r.attempt, r.state) for r in before] != [
        (r.attempt, r.state) for r in now
    ] and not decision.needs_confirmation:
        current = {node.uid for node in observation.nodes if before and node.attempt == before[-1].attempt}
        assert not [a for a in select_pod_actions(decision) if isinstance(a, Create) or a.uid in current]


@fuzzing
@given(jobs(), observations)
def test_pods_are_created_only_after_older_pods_are_fenced(ftjob: FineTuneJob, observation: Observation) -> None:
    decision = decide(ftjob, replace(observation, is_fresh=True), NOW, SETTINGS)
    if not any(isinstance(action, Create) for action in decision.actions):
        return
    record = ftjob.status.attempts[-1]
    older = [node for node in observation.live_nodes() if node.attempt != record.attempt and node.may_run(NOW)]

    assert (record.state in (AttemptState.STARTING, AttemptState.RUNNING), record.created) == (True, False)
    assert older == []
    assert ftjob.status.completion_time is None
    assert not ftjob.spec.suspend


@fuzzing
@given(jobs(), observations)
def test_finished_status_is_final_and_attempt_numbers_increase_by_one(
    ftjob: FineTuneJob, observation: Observation
) -> None:
    decision = decide(ftjob, observation, NOW, SETTINGS)
    before = ftjob.status.attempt if ftjob.status.attempt is not None else -1
    if ftjob.status.completion_time is not None:
        is_deleted = ftjob.metadata.deletion_timestamp is not None
        acknowledged = acknowledge_generation(ftjob.status, ftjob.metadata.generation)
        assert decision.status == (ftjob.status if is_deleted else acknowledged)
    elif decision.status.attempt is not None:
        assert decision.status.attempt - before in (0, 1)


@fuzzing
@given(jobs(), observations)
def test_cancelled_job_creates_nothing_and_ends_once_no_pod_can_run(
    ftjob: FineTuneJob, observation: Observation
) -> None:
    ftjob = ftjob.model_copy(update={"spec": ftjob.spec.model_copy(update={"cancel": True})})
    observation = replace(observation, is_fresh=True)
    for _ in range(MAX_DECISIONS):
        decision = decide(ftjob, observation, NOW, SETTINGS)
        assert not [action for action in decision.actions if isinstance(action, Create)]
        ftjob = apply_status(ftjob, decision)

    can_run = any(node.may_run(NOW) for node in observation.live_nodes())
    assert ftjob.status.completion_time is not None or ftjob.metadata.deletion_timestamp is not None or can_run


@fuzzing
@given(jobs(), observations)
def test_requeue_after_is_positive(ftjob: FineTuneJob, observation: Observation) -> None:
    requeue_after = decide(ftjob, observation, NOW, SETTINGS).requeue_after

    assert requeue_after is None or requeue_after > timedelta()


@fuzzing
@given(jobs(), observations, st.integers(0, 8000))
def test_status_does_not_change_before_the_requeue_time(
    ftjob: FineTuneJob, observation: Observation, elapsed_seconds: int
) -> None:
    observation = replace(observation, is_fresh=True)
    for _ in range(MAX_DECISIONS):
        ftjob = apply_status(ftjob, decide(ftjob, observation, NOW, SETTINGS))
    decision = decide(ftjob, observation, NOW, SETTINGS)
    later: datetime = NOW + timedelta(seconds=elapsed_seconds)
    if decision.requeue_after is None or later < NOW + decision.requeue_after:
        assert decide(ftjob, observation, later, SETTINGS).status == ftjob.status
