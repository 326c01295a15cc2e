"""Phase, conditions, messages and transition times of the derived status."""

from datetime import timedelta
from typing import Any

import pytest

from finetune_api.v1alpha1.status import (
    AttemptRecord,
    AttemptState,
    Condition,
    Evidence,
    JobStatus,
    Phase,
    Progress,
    WaitStatus,
)
from finetune_operator.core.conditions import (
    StatusContext,
    derive_status,
    is_suspended,
    keep_transition_times,
    without_cosmetic_fields,
)
from finetune_operator.core.pending import PendingReason
from finetune_operator.observation.pods import Observation
from testing.builders.jobs import NOW, RawBody, command, job, observation_of, pod, running_pod, terminating_pod

LATER = NOW + timedelta(minutes=5)
JOB = job()
PULL = PendingReason("ImagePullFailed", "no such tag", image_pull=True)
UNSCHEDULABLE = PendingReason("Unschedulable", "1 of 2 pods cannot be placed: 0/3 nodes fit")


def status_with_attempts(*states: AttemptState, **last: Any) -> JobStatus:
    """Return a status with an attempt in each of these states; `last` updates the last one."""
    records = [
        AttemptRecord(attempt=number, state=state, reason="RankKilled", message="rank 3 was ended by SIGKILL")
        for number, state in enumerate(states)
    ]
    records[-1] = records[-1].model_copy(update=last)
    return JobStatus(attempt=len(records) - 1, attempts=tuple(records), start_time=NOW)


def finished(state: AttemptState) -> JobStatus:
    return status_with_attempts(state).model_copy(update={"completion_time": NOW})


def restarting(**last: Any) -> JobStatus:
    failed = status_with_attempts(AttemptState.FAILED, AttemptState.STARTING, reason="", message="", **last)
    return failed.model_copy(update={"restarts": 1})


def status_of(
    status: JobStatus, *pods: RawBody, pending_reason: PendingReason | None = None, suspend: bool = False
) -> JobStatus:
    """Return the derived status five minutes after NOW."""
    ftjob = job(status=status, suspend=suspend)
    return derive_status(ftjob, StatusContext(observation_of(ftjob, *pods), pending_reason, LATER))


def true_conditions(status: JobStatus) -> dict[str, str]:
    """Return the reasons of the conditions that are true."""
    return {condition.type: condition.reason for condition in status.conditions if condition.status == "True"}


STAGES = [
    pytest.param(status_of(JobStatus()), Phase.QUEUED, {"Reconciling": "Queued"}, id="new"),
    pytest.param(
        status_of(JobStatus(), suspend=True), Phase.SUSPENDED, {"Suspended": "Suspended"}, id="created suspended"
    ),
    pytest.param(
        status_of(status_with_attempts(AttemptState.STARTING)),
        Phase.QUEUED,
        {"Reconciling": "Starting"},
        id="starting without pods",
    ),
    pytest.param(
        status_of(status_with_attempts(AttemptState.STARTING), pod(JOB, 0)),
        Phase.STARTING,
        {"Reconciling": "Starting"},
        id="starting with a scheduled pod",
    ),
    pytest.param(
        status_of(status_with_attempts(AttemptState.STARTING), pending_reason=UNSCHEDULABLE),
        Phase.QUEUED,
        {"Reconciling": "Unschedulable"},
        id="unschedulable",
    ),
    pytest.param(
        status_of(status_with_attempts(AttemptState.RUNNING)), Phase.RUNNING, {"Running": "Running"}, id="running"
    ),
    pytest.param(
        status_of(status_with_attempts(AttemptState.STOPPING)),
        Phase.RESTARTING,
        {"Reconciling": "Stopping"},
        id="stopping after a failure",
    ),
    pytest.param(
        status_of(status_with_attempts(AttemptState.STOPPING), suspend=True),
        Phase.SUSPENDED,
        {"Reconciling": "Stopping"},
        id="stopping to suspend",
    ),
    pytest.param(
        status_of(status_with_attempts(AttemptState.STOPPED), suspend=True),
        Phase.SUSPENDED,
        {"Suspended": "Suspended"},
        id="suspended",
    ),
    pytest.param(status_of(restarting()), Phase.RESTARTING, {"Reconciling": "Restarting"}, id="restarting"),
    pytest.param(
        status_of(status_with_attempts(AttemptState.STOPPED, AttemptState.STARTING), pod(JOB, 0, attempt=1)),
        Phase.STARTING,
        {"Reconciling": "Starting"},
        id="resumed, which is not a restart",
    ),
    pytest.param(
        status_of(finished(AttemptState.SUCCEEDED)),
        Phase.COMPLETE,
        {"Complete": "RankKilled", "Finished": "RankKilled"},
        id="complete, with the reason of its last attempt",
    ),
    pytest.param(
        status_of(finished(AttemptState.FAILED)),
        Phase.FAILED,
        {"Failed": "RankKilled", "Finished": "RankKilled", "Stalled": "RankKilled"},
        id="failed, with the reason of its last attempt",
    ),
    pytest.param(
        status_of(finished(AttemptState.SUCCEEDED), suspend=True),
        Phase.COMPLETE,
        {"Complete": "RankKilled", "Finished": "RankKilled"},
        id="complete, with spec.suspend set later",
    ),
]


@pytest.mark.parametrize(("status", "phase", "conditions"), STAGES)
def test_each_stage_has_its_phase_and_conditions(status: JobStatus, phase: Phase, conditions: dict[str, str]) -> None:
    assert (status.phase, true_conditions(status)) == (phase, conditions)


def test_every_phase_has_a_stage() -> None:
    assert {case.values[1] for case in STAGES} == set(Phase)


@pytest.mark.parametrize(("status", "phase", "conditions"), STAGES)
def test_running_and_suspended_are_always_present_and_the_others_only_while_true(
    status: JobStatus, phase: Phase, conditions: dict[str, str]
) -> None:
    types = [condition.type for condition in status.conditions]
    assert types[:2] == ["Running", "Suspended"]
    assert set(types[2:]) == conditions.keys() - {"Running", "Suspended"}
    assert {condition.observed_generation for condition in status.conditions} == {JOB.metadata.generation}


@pytest.mark.parametrize(
    ("status", "suspend", "reason"),
    [
        pytest.param(status_with_attempts(AttemptState.RUNNING), False, "Active", id="suspend not set"),
        pytest.param(
            status_with_attempts(AttemptState.STOPPING), True, "Suspending", id="suspend set and pods running"
        ),
        pytest.param(finished(AttemptState.FAILED), True, "Active", id="suspend set after the end"),
    ],
)
def test_the_suspended_condition_of_a_job_with_pods_is_false_with_a_reason(
    status: JobStatus, suspend: bool, reason: str
) -> None:
    [condition] = [c for c in status_of(status, suspend=suspend).conditions if c.type == "Suspended"]
    assert (condition.status, condition.reason, condition.message) == ("False", reason, "")


@pytest.mark.parametrize(
    ("status", "message"),
    [
        pytest.param(
            status_of(JobStatus(), suspend=True),
            "not started; set spec.suspend to false to start",
            id="created suspended",
        ),
        pytest.param(status_of(status_with_attempts(AttemptState.STARTING)), "attempt 0 is starting", id="starting"),
        pytest.param(
            status_of(status_with_attempts(AttemptState.STARTING), pending_reason=PULL), "no such tag", id="pending"
        ),
        pytest.param(status_of(status_with_attempts(AttemptState.RUNNING)), "attempt 0 runs on 2 nodes", id="running"),
        pytest.param(
            status_of(status_with_attempts(AttemptState.STOPPING)), "attempt 0 is stopping: RankKilled", id="stopping"
        ),
        pytest.param(status_of(restarting()), "attempt 1 starts; rank 3 was ended by SIGKILL", id="restarting"),
        pytest.param(
            status_of(restarting(not_before=LATER)),
            "attempt 1 starts after 12:05:00; rank 3 was ended by SIGKILL",
            id="restarting later",
        ),
        pytest.param(
            status_of(status_with_attempts(AttemptState.STOPPED), suspend=True),
            "every pod is released; no checkpoint was written yet",
            id="suspended without a checkpoint",
        ),
        pytest.param(
            status_of(
                status_with_attempts(AttemptState.STOPPED).model_copy(
                    update={"progress": Progress(last_checkpoint="step-8")}
                ),
                suspend=True,
            ),
            "every pod is released; it resumes from step-8",
            id="suspended",
        ),
        pytest.param(status_of(finished(AttemptState.FAILED)), "rank 3 was ended by SIGKILL", id="failed"),
    ],
)
def test_a_condition_message_describes_the_state_of_the_job(status: JobStatus, message: str) -> None:
    assert message in {condition.message for condition in status.conditions}


def test_a_condition_keeps_its_transition_time_until_its_status_changes() -> None:
    def running_is(status: Any, *, minute: int, reason: str) -> Condition:
        time = NOW + timedelta(minutes=minute)
        return Condition(type="Running", status=status, last_transition_time=time, reason=reason)

    before = [running_is("False", minute=0, reason="Queued")]
    [same] = keep_transition_times([running_is("False", minute=5, reason="Starting")], before)
    assert (same.last_transition_time, same.reason) == (NOW, "Starting")
    [changed] = keep_transition_times([running_is("True", minute=5, reason="Running")], before)
    assert changed.last_transition_time == LATER


def test_deriving_the_status_again_changes_nothing() -> None:
    first = status_of(status_with_attempts(AttemptState.STARTING), pod(JOB, 0), pending_reason=UNSCHEDULABLE)
    second = derive_status(
        job(status=first), StatusContext(observation_of(JOB, pod(JOB, 0)), UNSCHEDULABLE, LATER + timedelta(hours=1))
    )
    assert second == first


def test_a_pending_reason_keeps_its_since_and_gets_the_newest_message() -> None:
    before = status_with_attempts(AttemptState.STARTING).model_copy(
        update={"waiting": WaitStatus(reason="Unschedulable", message="2 of 2 pods", since=NOW)}
    )
    assert status_of(before, pending_reason=UNSCHEDULABLE).waiting == WaitStatus(
        reason="Unschedulable", message=UNSCHEDULABLE.message, since=NOW
    )
    assert status_of(before, pending_reason=PULL).waiting == WaitStatus(
        reason="ImagePullFailed", message="no such tag", since=LATER
    )
    assert status_of(before).waiting is None


@pytest.mark.parametrize(
    "status", [status_with_attempts(AttemptState.RUNNING), finished(AttemptState.FAILED), JobStatus()]
)
def test_only_a_starting_attempt_has_a_pending_reason(status: JobStatus) -> None:
    assert status_of(status, pending_reason=UNSCHEDULABLE).waiting is None


def test_the_status_lists_nodes_by_rank_without_deleted_pods() -> None:
    pending_pod = pod(JOB, 0, containerStatuses=[{"name": "trainer", "state": {"waiting": {"reason": "ErrImagePull"}}}])
    observation = observation_of(JOB, pending_pod, terminating_pod(running_pod(JOB, 1)))
    nodes = derive_status(
        job(status=status_with_attempts(AttemptState.RUNNING)), StatusContext(observation, None, NOW)
    ).nodes
    assert [(n.node_rank, n.pod_name, n.k8s_node, n.phase) for n in nodes] == [
        (0, "bert-0-0", "gpu-0", "ErrImagePull"),
        (1, "bert-0-1", "gpu-1", "Terminating"),
    ]
    with_tombstone = Observation(nodes=observation_of(JOB, running_pod(JOB, 0), gone=(running_pod(JOB, 1),)).nodes)
    nodes = derive_status(
        job(status=status_with_attempts(AttemptState.RUNNING)), StatusContext(with_tombstone, None, NOW)
    ).nodes
    assert [(n.node_rank, n.phase) for n in nodes] == [(0, "Running")]


def test_a_job_is_suspended_only_if_the_spec_sets_it_and_no_pod_is_left() -> None:
    suspended_job, active_job = job(suspend=True), job()
    assert is_suspended(suspended_job, status_with_attempts(AttemptState.STOPPED))
    assert not is_suspended(suspended_job, status_with_attempts(AttemptState.STOPPING))
    assert not is_suspended(active_job, status_with_attempts(AttemptState.STOPPED))
    assert not is_suspended(suspended_job, finished(AttemptState.SUCCEEDED))


def test_progress_columns_nodes_and_steps_are_cosmetic_fields() -> None:
    before = status_of(status_with_attempts(AttemptState.RUNNING), running_pod(JOB, 0))
    [record] = before.attempts
    steps = record.model_copy(
        update={"first_step": 0, "first_step_time": NOW, "last_step": 9, "evidence": (Evidence(node_rank=0),)}
    )
    after = before.model_copy(update={"attempts": (steps,), "nodes": (), "display": None, "progress": Progress(step=9)})
    assert without_cosmetic_fields(after) == without_cosmetic_fields(before)


@pytest.mark.parametrize(
    ("outcome", "is_written"),
    [
        pytest.param("failed", True, id="possible root cause"),
        pytest.param("stopped", False, id="stopped by the operator"),
    ],
)
def test_evidence_of_a_failed_node_is_not_a_cosmetic_field(outcome: str, is_written: bool) -> None:
    before = status_with_attempts(AttemptState.STOPPING)
    end = Evidence(node_rank=0, ended=True, outcome=outcome)
    after = status_with_attempts(AttemptState.STOPPING, evidence=(end,))
    assert (without_cosmetic_fields(after) != without_cosmetic_fields(before)) is is_written


def test_a_suspended_command_has_no_known_checkpoint() -> None:
    ftjob = job(status=status_with_attempts(AttemptState.STOPPED), suspend=True, **command({"script": "train.py"}))
    status = derive_status(ftjob, StatusContext(observation_of(ftjob), None, LATER))

    (message,) = (c.message for c in status.conditions if c.type == "Suspended")
    assert message == "every pod is released"


def test_the_running_condition_names_an_unreachable_progress_endpoint() -> None:
    ftjob = job(status=status_with_attempts(AttemptState.RUNNING))
    reachable, unreachable = (
        derive_status(
            ftjob,
            StatusContext(
                observation_of(ftjob, running_pod(ftjob, 0), running_pod(ftjob, 1), unreachable_endpoint=address),
                None,
                LATER,
            ),
        ).conditions[0]
        for address in ("", "10.1.2.3:8080")
    )
    assert reachable.message == "attempt 0 runs on 2 nodes"
    assert unreachable.message.startswith("attempt 0 runs on 2 nodes; progress unavailable: ")
    assert "10.1.2.3:8080 does not answer" in unreachable.message
