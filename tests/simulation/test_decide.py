"""decide on statuses and observations of every kind, reachable or not: it never raises nor gets ahead of itself."""

import os
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finetune_api.termination import Outcome, Termination
from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, Evidence, JobStatus, RestartCounts, WaitStatus
from finetune_operator.core.actions import Create, DeletePod, Emit
from finetune_operator.core.decide import decide
from finetune_operator.core.job_context import Decision
from finetune_operator.core.stop_attempt import StopReason
from finetune_operator.observation.pods import Claim, Life, NodeObservation, Observation, Refusal, Waiting
from testing.builders.jobs import NOW, SETTINGS, job

EXAMPLES = int(os.environ.get("FINETUNE_EXAMPLES", "150"))
ENOUGH_STEPS = 8  # from any status to one that stays, while nothing else happens

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
    reason=st.sampled_from(("", "Error", "OOMKilled", "Evicted", "OutOfcpu", "StartError")),
    disruption=st.sampled_from(("", "DeletionByTaintManager", "EvictionByEvictionAPI", "SomethingNew")),
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
    life=st.sampled_from(Life),
    deleting=st.booleans(),
    deletion_deadline=st.one_of(moments, st.just(NOW + timedelta(seconds=90))),
    scheduled=st.booleans(),
    waiting=st.sampled_from(
        (None, *(Waiting(reason, "told") for reason in ("Unschedulable", "ErrImagePull", "InvalidImageName", "New")))
    ),
    evidence=evidences,
    termination=st.one_of(st.none(), st.builds(Termination, first_step=st.sampled_from((None, 3)))),
    making_since=moments,
    ready_to_start=st.sampled_from((None, True, False)),
)

refusals = st.builds(
    Refusal,
    kind=st.sampled_from(("Pod", "Service")),
    name=st.just("bert-0-0"),
    status=st.sampled_from((400, 403, 409, 413, 422)),
    message=st.just("no"),
    taken=st.booleans(),
    leaving=st.booleans(),
)

observations = st.builds(
    Observation,
    nodes=st.lists(nodes, max_size=6).map(tuple),
    service_exists=st.booleans(),
    edited_service=st.sampled_from(("", "d")),
    claims=st.sampled_from((None, (), (Claim("models", ("ReadWriteOnce",)),), (Claim("models", ("ReadWriteMany",)),))),
    refusals=st.lists(refusals, max_size=2).map(tuple),
    fresh=st.booleans(),
)

LIVING = (AttemptState.STARTING, AttemptState.RUNNING, AttemptState.STOPPING, AttemptState.STOPPED)


@st.composite
def statuses(draw: st.DrawFn) -> JobStatus:
    """None, alive in some state, or ended; with whatever a former operator may have left."""
    if draw(st.integers(0, 9)) == 0:
        return JobStatus(suspend_time=draw(moments))
    ended = draw(st.booleans()) and draw(st.booleans())
    count = draw(st.integers(1, 3))
    state = draw(st.sampled_from((AttemptState.SUCCEEDED, AttemptState.FAILED) if ended else LIVING))
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
    """Any of them."""
    fields: dict[str, Any] = {"numNodes": draw(st.integers(1, 3)), "suspend": draw(st.booleans())}
    for name, values in (("activeDeadlineSeconds", (50, 200)), ("ttlSecondsAfterFinished", (0, 40))):
        value = draw(st.sampled_from((None, *values)))
        if value is not None:
            fields[name] = value
    return job(status=draw(statuses()), deleted=draw(st.integers(0, 9)) == 0, **fields)


def after(of: FineTuneJob, decision: Decision) -> FineTuneJob:
    """The job once the status is written."""
    return of.model_copy(update={"status": decision.status})


def changes_of(decision: Decision) -> list[Create | DeletePod]:
    """The actions on pods and what they need."""
    return [action for action in decision.actions if isinstance(action, Create | DeletePod)]


@fuzzing
@given(jobs(), observations, seconds)
def test_decide_is_total_and_equal_input_gives_equal_output(of: FineTuneJob, seen: Observation, later: int) -> None:
    now = NOW + timedelta(seconds=later)

    assert decide(of, seen, now, SETTINGS) == decide(of, seen, now, SETTINGS)


@fuzzing
@given(jobs(), observations)
def test_while_nothing_happens_every_job_comes_to_rest(of: FineTuneJob, seen: Observation) -> None:
    seen = replace(seen, fresh=True)
    for _ in range(ENOUGH_STEPS):
        decision = decide(of, seen, NOW, SETTINGS)
        if decision.status == of.status:
            break
        of = after(of, decision)
    again = decide(of, seen, NOW, SETTINGS)

    assert again.status == of.status
    assert not [action for action in again.actions if isinstance(action, Emit)]


@fuzzing
@given(jobs(), observations)
def test_a_change_of_state_is_written_before_anything_that_follows_from_it(of: FineTuneJob, seen: Observation) -> None:
    decision = decide(of, seen, NOW, SETTINGS)
    before, now = of.status.attempts, decision.status.attempts
    if [(r.attempt, r.state) for r in before] != [(r.attempt, r.state) for r in now] and not decision.unsure:
        current = {node.uid for node in seen.nodes if before and node.attempt == before[-1].attempt}
        assert not [a for a in changes_of(decision) if isinstance(a, Create) or a.uid in current]


@fuzzing
@given(jobs(), observations)
def test_pods_are_made_for_a_starting_attempt_only_and_beside_no_older_one_that_may_run(
    of: FineTuneJob, seen: Observation
) -> None:
    decision = decide(of, replace(seen, fresh=True), NOW, SETTINGS)
    if not any(isinstance(action, Create) for action in decision.actions):
        return
    record = of.status.attempts[-1]
    older = [node for node in seen.live() if node.attempt != record.attempt and node.may_run(NOW)]

    assert (record.state in (AttemptState.STARTING, AttemptState.RUNNING), record.created) == (True, False)
    assert older == []
    assert of.status.completion_time is None
    assert not of.spec.suspend


@fuzzing
@given(jobs(), observations)
def test_an_end_is_for_good_and_attempts_grow_by_one(of: FineTuneJob, seen: Observation) -> None:
    decision = decide(of, seen, NOW, SETTINGS)
    before = of.status.attempt if of.status.attempt is not None else -1
    if of.status.completion_time is not None:
        assert decision.status == of.status
    elif decision.status.attempt is not None:
        assert decision.status.attempt - before in (0, 1)


@fuzzing
@given(jobs(), observations)
def test_a_next_look_is_never_in_the_past(of: FineTuneJob, seen: Observation) -> None:
    requeue_after = decide(of, seen, NOW, SETTINGS).requeue_after

    assert requeue_after is None or requeue_after > timedelta()


@fuzzing
@given(jobs(), observations, st.integers(0, 8000))
def test_time_alone_changes_nothing_before_the_next_look(of: FineTuneJob, seen: Observation, elapsed: int) -> None:
    seen = replace(seen, fresh=True)
    for _ in range(ENOUGH_STEPS):
        of = after(of, decide(of, seen, NOW, SETTINGS))
    decision = decide(of, seen, NOW, SETTINGS)
    later: datetime = NOW + timedelta(seconds=elapsed)
    if decision.requeue_after is None or later < NOW + decision.requeue_after:
        assert decide(of, seen, later, SETTINGS).status == of.status
