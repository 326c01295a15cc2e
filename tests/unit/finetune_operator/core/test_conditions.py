"""What a status tells: phase and conditions of every stage of a job, and since when."""

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
from finetune_operator.core.conditions import Told, essence, keep_transition_times, suspended, tell
from finetune_operator.core.pending import Wait
from finetune_operator.observation.pods import Observation
from testing.builders.jobs import NOW, Raw, command, deleting, job, pod, running, seen

LATER = NOW + timedelta(minutes=5)
OF = job()
PULL = Wait("ImagePullFailed", "no such tag", image=True)
NO_ROOM = Wait("Unschedulable", "1 of 2 pods cannot be placed: 0/3 nodes fit")


def attempts(*states: AttemptState, **last: Any) -> JobStatus:
    """A status with an attempt in each of these states; `last` fills in the last one."""
    records = [
        AttemptRecord(attempt=number, state=state, reason="RankKilled", message="rank 3 was ended by SIGKILL")
        for number, state in enumerate(states)
    ]
    records[-1] = records[-1].model_copy(update=last)
    return JobStatus(attempt=len(records) - 1, attempts=tuple(records), start_time=NOW)


def over(state: AttemptState) -> JobStatus:
    return attempts(state).model_copy(update={"completion_time": NOW})


def restarting(**last: Any) -> JobStatus:
    failed = attempts(AttemptState.FAILED, AttemptState.STARTING, reason="", message="", **last)
    return failed.model_copy(update={"restarts": 1})


def told(status: JobStatus, *pods: Raw, wait: Wait | None = None, suspend: bool = False) -> JobStatus:
    """The status as it is told five minutes later."""
    of = job(status=status, suspend=suspend)
    return tell(of, Told(seen(of, *pods), wait, LATER))


def holding(status: JobStatus) -> dict[str, str]:
    """The reason of every condition that is true."""
    return {condition.type: condition.reason for condition in status.conditions if condition.status == "True"}


STAGES = [
    pytest.param(told(JobStatus()), Phase.QUEUED, {"Reconciling": "Queued"}, id="new"),
    pytest.param(told(JobStatus(), suspend=True), Phase.SUSPENDED, {"Suspended": "Suspended"}, id="held back"),
    pytest.param(told(attempts(AttemptState.STARTING)), Phase.QUEUED, {"Reconciling": "Starting"}, id="decided"),
    pytest.param(
        told(attempts(AttemptState.STARTING), pod(OF, 0)), Phase.STARTING, {"Reconciling": "Starting"}, id="placed"
    ),
    pytest.param(
        told(attempts(AttemptState.STARTING), wait=NO_ROOM), Phase.QUEUED, {"Reconciling": "Unschedulable"}, id="waits"
    ),
    pytest.param(told(attempts(AttemptState.RUNNING)), Phase.RUNNING, {"Running": "Running"}, id="runs"),
    pytest.param(
        told(attempts(AttemptState.STOPPING)), Phase.RESTARTING, {"Reconciling": "Stopping"}, id="stops after a failure"
    ),
    pytest.param(
        told(attempts(AttemptState.STOPPING), suspend=True),
        Phase.SUSPENDED,
        {"Reconciling": "Stopping"},
        id="stops because it is to be suspended",
    ),
    pytest.param(
        told(attempts(AttemptState.STOPPED), suspend=True), Phase.SUSPENDED, {"Suspended": "Suspended"}, id="suspended"
    ),
    pytest.param(told(restarting()), Phase.RESTARTING, {"Reconciling": "Restarting"}, id="restarts"),
    pytest.param(
        told(attempts(AttemptState.STOPPED, AttemptState.STARTING), pod(OF, 0, attempt=1)),
        Phase.STARTING,
        {"Reconciling": "Starting"},
        id="is resumed, which is no restart",
    ),
    pytest.param(
        told(over(AttemptState.SUCCEEDED)),
        Phase.COMPLETE,
        {"Complete": "RankKilled", "Finished": "RankKilled"},
        id="complete, in the words of its last attempt",
    ),
    pytest.param(
        told(over(AttemptState.FAILED)),
        Phase.FAILED,
        {"Failed": "RankKilled", "Finished": "RankKilled", "Stalled": "RankKilled"},
        id="failed, in the words of its last attempt",
    ),
    pytest.param(
        told(over(AttemptState.SUCCEEDED), suspend=True),
        Phase.COMPLETE,
        {"Complete": "RankKilled", "Finished": "RankKilled"},
        id="complete, and nothing is left to suspend",
    ),
]


@pytest.mark.parametrize(("status", "phase", "conditions"), STAGES)
def test_each_stage_has_a_phase_and_conditions(status: JobStatus, phase: Phase, conditions: dict[str, str]) -> None:
    assert (status.phase, holding(status)) == (phase, conditions)


def test_every_phase_has_a_stage() -> None:
    assert {case.values[1] for case in STAGES} == set(Phase)


@pytest.mark.parametrize(("status", "phase", "conditions"), STAGES)
def test_running_and_suspended_are_always_told_and_the_others_only_while_they_hold(
    status: JobStatus, phase: Phase, conditions: dict[str, str]
) -> None:
    kinds = [condition.type for condition in status.conditions]
    assert kinds[:2] == ["Running", "Suspended"]
    assert set(kinds[2:]) == conditions.keys() - {"Running", "Suspended"}
    assert {condition.observed_generation for condition in status.conditions} == {OF.metadata.generation}


@pytest.mark.parametrize(
    ("status", "suspend", "reason"),
    [
        pytest.param(attempts(AttemptState.RUNNING), False, "Active", id="nobody asked"),
        pytest.param(attempts(AttemptState.STOPPING), True, "Suspending", id="asked, and pods are left"),
        pytest.param(over(AttemptState.FAILED), True, "Active", id="asked too late"),
    ],
)
def test_until_a_job_is_suspended_it_is_told_what_it_is_instead(status: JobStatus, suspend: bool, reason: str) -> None:
    [condition] = [c for c in told(status, suspend=suspend).conditions if c.type == "Suspended"]
    assert (condition.status, condition.reason, condition.message) == ("False", reason, "")


@pytest.mark.parametrize(
    ("status", "message"),
    [
        pytest.param(
            told(JobStatus(), suspend=True), "not started; set spec.suspend to false to start", id="held back"
        ),
        pytest.param(told(attempts(AttemptState.STARTING)), "attempt 0 is starting", id="starting"),
        pytest.param(told(attempts(AttemptState.STARTING), wait=PULL), "no such tag", id="waiting"),
        pytest.param(told(attempts(AttemptState.RUNNING)), "attempt 0 runs on 2 nodes", id="running"),
        pytest.param(told(attempts(AttemptState.STOPPING)), "attempt 0 is stopping: RankKilled", id="stopping"),
        pytest.param(told(restarting()), "attempt 1 starts; rank 3 was ended by SIGKILL", id="restarting"),
        pytest.param(
            told(restarting(not_before=LATER)),
            "attempt 1 starts after 12:05:00; rank 3 was ended by SIGKILL",
            id="restarting later",
        ),
        pytest.param(
            told(attempts(AttemptState.STOPPED), suspend=True),
            "every pod is released; no checkpoint was written yet",
            id="suspended with nothing saved",
        ),
        pytest.param(
            told(
                attempts(AttemptState.STOPPED).model_copy(update={"progress": Progress(last_checkpoint="step-8")}),
                suspend=True,
            ),
            "every pod is released; it resumes from step-8",
            id="suspended",
        ),
        pytest.param(told(over(AttemptState.FAILED)), "rank 3 was ended by SIGKILL", id="failed"),
    ],
)
def test_a_person_reads_where_the_job_stands(status: JobStatus, message: str) -> None:
    assert message in {condition.message for condition in status.conditions}


def test_a_condition_keeps_its_time_until_its_status_changes() -> None:
    def running_is(status: Any, *, minute: int, reason: str) -> Condition:
        time = NOW + timedelta(minutes=minute)
        return Condition(type="Running", status=status, last_transition_time=time, reason=reason)

    before = [running_is("False", minute=0, reason="Queued")]
    [same] = keep_transition_times([running_is("False", minute=5, reason="Starting")], before)
    assert (same.last_transition_time, same.reason) == (NOW, "Starting")
    [changed] = keep_transition_times([running_is("True", minute=5, reason="Running")], before)
    assert changed.last_transition_time == LATER


def test_telling_the_same_again_changes_nothing() -> None:
    once = told(attempts(AttemptState.STARTING), pod(OF, 0), wait=NO_ROOM)
    again = tell(job(status=once), Told(seen(OF, pod(OF, 0)), NO_ROOM, LATER + timedelta(hours=1)))
    assert again == once


def test_a_wait_counts_from_its_beginning_in_its_newest_words() -> None:
    before = attempts(AttemptState.STARTING).model_copy(
        update={"waiting": WaitStatus(reason="Unschedulable", message="2 of 2 pods", since=NOW)}
    )
    assert told(before, wait=NO_ROOM).waiting == WaitStatus(reason="Unschedulable", message=NO_ROOM.message, since=NOW)
    assert told(before, wait=PULL).waiting == WaitStatus(reason="ImagePullFailed", message="no such tag", since=LATER)
    assert told(before).waiting is None


@pytest.mark.parametrize("status", [attempts(AttemptState.RUNNING), over(AttemptState.FAILED), JobStatus()])
def test_only_an_attempt_that_starts_waits(status: JobStatus) -> None:
    assert told(status, wait=NO_ROOM).waiting is None


def test_nodes_are_told_as_people_name_them_and_those_that_are_gone_are_not() -> None:
    waits = pod(OF, 0, containerStatuses=[{"name": "trainer", "state": {"waiting": {"reason": "ErrImagePull"}}}])
    observation = seen(OF, waits, deleting(running(OF, 1)))
    nodes = tell(job(status=attempts(AttemptState.RUNNING)), Told(observation, None, NOW)).nodes
    assert [(n.node_rank, n.pod_name, n.k8s_node, n.phase) for n in nodes] == [
        (0, "bert-0-0", "gpu-0", "ErrImagePull"),
        (1, "bert-0-1", "gpu-1", "Terminating"),
    ]
    remembered = Observation(nodes=seen(OF, running(OF, 0), gone=(running(OF, 1),)).nodes)
    nodes = tell(job(status=attempts(AttemptState.RUNNING)), Told(remembered, None, NOW)).nodes
    assert [(n.node_rank, n.phase) for n in nodes] == [(0, "Running")]


def test_a_job_is_suspended_only_when_asked_to_and_without_pods() -> None:
    asked, not_asked = job(suspend=True), job()
    assert suspended(asked, attempts(AttemptState.STOPPED))
    assert not suspended(asked, attempts(AttemptState.STOPPING))
    assert not suspended(not_asked, attempts(AttemptState.STOPPED))
    assert not suspended(asked, over(AttemptState.SUCCEEDED))


def test_readers_alone_miss_progress_columns_nodes_and_steps() -> None:
    before = told(attempts(AttemptState.RUNNING), running(OF, 0))
    [record] = before.attempts
    steps = record.model_copy(
        update={"first_step": 0, "first_step_time": NOW, "last_step": 9, "evidence": (Evidence(node_rank=0),)}
    )
    after = before.model_copy(update={"attempts": (steps,), "nodes": (), "display": None, "progress": Progress(step=9)})
    assert essence(after) == essence(before)


@pytest.mark.parametrize(
    ("outcome", "needed"),
    [pytest.param("failed", True, id="a cause"), pytest.param("stopped", False, id="our own work")],
)
def test_evidence_of_an_end_may_not_come_late(outcome: str, needed: bool) -> None:
    before = attempts(AttemptState.STOPPING)
    end = Evidence(node_rank=0, ended=True, outcome=outcome)
    after = attempts(AttemptState.STOPPING, evidence=(end,))
    assert (essence(after) != essence(before)) is needed


def test_what_a_command_saved_it_alone_knows() -> None:
    of = job(status=attempts(AttemptState.STOPPED), suspend=True, **command({"script": "train.py"}))
    status = tell(of, Told(seen(of), None, LATER))

    (message,) = (c.message for c in status.conditions if c.type == "Suspended")
    assert message == "every pod is released"


def test_a_job_whose_progress_nobody_can_ask_for_says_so_and_whom_was_asked() -> None:
    of = job(status=attempts(AttemptState.RUNNING))
    heard, unheard = (
        tell(of, Told(seen(of, running(of, 0), running(of, 1), unheard=address), None, LATER)).conditions[0]
        for address in ("", "10.1.2.3:8080")
    )
    assert heard.message == "attempt 0 runs on 2 nodes"
    assert unheard.message.startswith("attempt 0 runs on 2 nodes; how far it is nobody can see: ")
    assert "no answer from 10.1.2.3:8080" in unheard.message
