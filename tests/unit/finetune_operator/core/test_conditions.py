"""Tests of the phase, conditions, messages and transition times of the derived status."""

from datetime import timedelta
from typing import Any

import pytest

from finetune_api.v1alpha1.status import (
    AttemptState,
    Condition,
    JobStatus,
    Phase,
    Progress,
)
from finetune_operator.core.conditions import keep_transition_times
from finetune_operator.core.derive_status import StatusContext, derive_status
from testing.builders.jobs import NOW, RawBody, build_observation, command, job, pod, running_pod
from testing.builders.statuses import (
    LATER,
    PULL,
    UNSCHEDULABLE,
    build_finished_status,
    build_status_with_attempts,
    derive_later_status,
)

JOB = job()


def restarting_status(**last_record_fields: Any) -> JobStatus:
    failed = build_status_with_attempts(
        AttemptState.FAILED, AttemptState.STARTING, reason="", message="", **last_record_fields
    )
    return failed.model_copy(update={"restarts": 1})


def select_true_conditions(status: JobStatus) -> dict[str, str]:
    """Return the reasons of the conditions with status True, indexed by condition type."""
    return {condition.type: condition.reason for condition in status.conditions if condition.status == "True"}


STARTING, RUNNING, STOPPING = AttemptState.STARTING, AttemptState.RUNNING, AttemptState.STOPPING
STOPPED = AttemptState.STOPPED


def derive_after(*states: AttemptState, pods: tuple[RawBody, ...] = (), **fields: Any) -> JobStatus:
    """Return the later status of a job with one attempt per state."""
    return derive_later_status(build_status_with_attempts(*states), *pods, **fields)


STAGES = [
    pytest.param(derive_later_status(JobStatus()), Phase.QUEUED, {"Reconciling": "Queued"}, id="new"),
    pytest.param(
        derive_later_status(JobStatus(), suspend=True),
        Phase.SUSPENDED,
        {"Suspended": "Suspended"},
        id="created suspended",
    ),
    pytest.param(derive_after(STARTING), Phase.QUEUED, {"Reconciling": "Starting"}, id="starting without pods"),
    pytest.param(
        derive_after(STARTING, pods=(pod(JOB, 0),)),
        Phase.STARTING,
        {"Reconciling": "Starting"},
        id="starting with a scheduled pod",
    ),
    pytest.param(
        derive_after(STARTING, pending_reason=UNSCHEDULABLE),
        Phase.QUEUED,
        {"Reconciling": "Unschedulable"},
        id="unschedulable",
    ),
    pytest.param(derive_after(RUNNING), Phase.RUNNING, {"Running": "Running"}, id="running"),
    pytest.param(derive_after(STOPPING), Phase.RESTARTING, {"Reconciling": "Stopping"}, id="stopping after a failure"),
    pytest.param(
        derive_after(STOPPING, suspend=True), Phase.SUSPENDED, {"Reconciling": "Stopping"}, id="stopping to suspend"
    ),
    pytest.param(derive_after(STOPPED, suspend=True), Phase.SUSPENDED, {"Suspended": "Suspended"}, id="suspended"),
    pytest.param(
        derive_later_status(restarting_status()), Phase.RESTARTING, {"Reconciling": "Restarting"}, id="restarting"
    ),
    pytest.param(
        derive_after(STOPPED, STARTING, pods=(pod(JOB, 0, attempt=1),)),
        Phase.STARTING,
        {"Reconciling": "Starting"},
        id="resumed, which is not a restart",
    ),
    pytest.param(
        derive_later_status(build_finished_status(AttemptState.SUCCEEDED)),
        Phase.COMPLETE,
        {"Complete": "RankKilled", "Finished": "RankKilled"},
        id="complete, with the reason of its last attempt",
    ),
    pytest.param(
        derive_later_status(build_finished_status(AttemptState.FAILED)),
        Phase.FAILED,
        {"Failed": "RankKilled", "Finished": "RankKilled", "Stalled": "RankKilled"},
        id="failed, with the reason of its last attempt",
    ),
    pytest.param(
        derive_later_status(build_finished_status(AttemptState.SUCCEEDED), suspend=True),
        Phase.COMPLETE,
        {"Complete": "RankKilled", "Finished": "RankKilled"},
        id="complete, with spec.suspend set later",
    ),
]


@pytest.mark.parametrize(("status", "phase", "conditions"), STAGES)
def test_phase_and_conditions_match_the_stage_of_the_job(
    status: JobStatus, phase: Phase, conditions: dict[str, str]
) -> None:
    assert (status.phase, select_true_conditions(status)) == (phase, conditions)


def test_parametrized_stages_cover_every_phase() -> None:
    assert {case.values[1] for case in STAGES} == set(Phase)


@pytest.mark.parametrize(("status", "phase", "conditions"), STAGES)
def test_only_the_running_and_suspended_conditions_are_kept_with_status_false(
    status: JobStatus, phase: Phase, conditions: dict[str, str]
) -> None:
    types = [condition.type for condition in status.conditions]
    assert types[:2] == ["Running", "Suspended"]
    assert set(types[2:]) == conditions.keys() - {"Running", "Suspended"}
    assert {condition.observed_generation for condition in status.conditions} == {JOB.metadata.generation}


@pytest.mark.parametrize(
    ("status", "suspend", "reason"),
    [
        pytest.param(build_status_with_attempts(AttemptState.RUNNING), False, "Active", id="suspend not set"),
        pytest.param(
            build_status_with_attempts(AttemptState.STOPPING), True, "Suspending", id="suspend set and pods running"
        ),
        pytest.param(build_finished_status(AttemptState.FAILED), True, "Active", id="suspend set after the end"),
    ],
)
def test_suspended_condition_is_false_with_a_reason_while_pods_exist(
    status: JobStatus, suspend: bool, reason: str
) -> None:
    [condition] = [c for c in derive_later_status(status, suspend=suspend).conditions if c.type == "Suspended"]
    assert (condition.status, condition.reason, condition.message) == ("False", reason, "")


@pytest.mark.parametrize(
    ("status", "message"),
    [
        pytest.param(
            derive_later_status(JobStatus(), suspend=True),
            "not started; set spec.suspend to false to start",
            id="created suspended",
        ),
        pytest.param(derive_after(STARTING), "attempt 0 is starting", id="starting"),
        pytest.param(derive_after(STARTING, pending_reason=PULL), "no such tag", id="pending"),
        pytest.param(derive_after(RUNNING), "attempt 0 runs on 2 nodes", id="running"),
        pytest.param(derive_after(STOPPING), "attempt 0 is stopping: RankKilled", id="stopping"),
        pytest.param(
            derive_later_status(restarting_status()), "attempt 1 starts; rank 3 was ended by SIGKILL", id="restarting"
        ),
        pytest.param(
            derive_later_status(restarting_status(not_before=LATER)),
            "attempt 1 starts after 12:05:00; rank 3 was ended by SIGKILL",
            id="restarting later",
        ),
        pytest.param(
            derive_after(STOPPED, suspend=True),
            "every pod is released; no checkpoint was written yet",
            id="suspended without a checkpoint",
        ),
        pytest.param(
            derive_later_status(
                build_status_with_attempts(STOPPED).model_copy(update={"progress": Progress(last_checkpoint="step-8")}),
                suspend=True,
            ),
            "every pod is released; it resumes from step-8",
            id="suspended",
        ),
        pytest.param(
            derive_later_status(build_finished_status(AttemptState.FAILED)), "rank 3 was ended by SIGKILL", id="failed"
        ),
    ],
)
def test_condition_message_describes_the_state_of_the_job(status: JobStatus, message: str) -> None:
    assert message in {condition.message for condition in status.conditions}


def test_a_condition_keeps_its_transition_time_until_its_status_changes() -> None:
    def running_condition(status: Any, *, minute: int, reason: str) -> Condition:
        time = NOW + timedelta(minutes=minute)
        return Condition(type="Running", status=status, last_transition_time=time, reason=reason)

    before = [running_condition("False", minute=0, reason="Queued")]
    [same] = keep_transition_times([running_condition("False", minute=5, reason="Starting")], before)
    assert (same.last_transition_time, same.reason) == (NOW, "Starting")
    [changed] = keep_transition_times([running_condition("True", minute=5, reason="Running")], before)
    assert changed.last_transition_time == LATER


def test_message_of_a_suspended_command_does_not_mention_a_checkpoint() -> None:
    ftjob = job(
        status=build_status_with_attempts(AttemptState.STOPPED), suspend=True, **command({"script": "train.py"})
    )
    status = derive_status(ftjob, StatusContext(build_observation(ftjob), None, LATER))

    (message,) = (c.message for c in status.conditions if c.type == "Suspended")
    assert message == "every pod is released"


def test_running_condition_reports_an_unreachable_progress_endpoint() -> None:
    ftjob = job(status=build_status_with_attempts(AttemptState.RUNNING))
    reachable, unreachable = (
        derive_status(
            ftjob,
            StatusContext(
                build_observation(ftjob, running_pod(ftjob, 0), running_pod(ftjob, 1), unreachable_endpoint=address),
                None,
                LATER,
            ),
        ).conditions[0]
        for address in ("", "10.1.2.3:8080")
    )
    assert reachable.message == "attempt 0 runs on 2 nodes"
    assert unreachable.message.startswith("attempt 0 runs on 2 nodes; progress unavailable: ")
    assert "10.1.2.3:8080 does not answer" in unreachable.message
