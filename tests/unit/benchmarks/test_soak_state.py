"""Tests that the state of a soak test notices every violated invariant."""

from datetime import timedelta

import pytest

from benchmarks.soak.scripts import SCRIPTS, JobPlan
from benchmarks.soak.state import NODE_LOSS, SUSPENSION, SoakState
from finetune_operator import names
from testing.builders.jobs import NOW, UID, RawBody, job, pod, running_pod, terminating_pod

PLAN = JobPlan("bert", nodes=2, script=SCRIPTS[0], start_seconds=0, run_seconds=1, ttl_seconds=None)


def build_job(*, uid: str = UID, **status: object) -> RawBody:
    metadata = {"name": "bert", "namespace": "default", "uid": uid}
    return {"metadata": metadata, "spec": {"numNodes": 2}, "status": {"attempt": 0, **status}}


def finished(phase: str, reason: str) -> RawBody:
    return build_job(conditions=[{"type": phase, "status": "True", "reason": reason}])


def ended_attempt(*, action: str, attempt: int = 0, restarts: int = 0) -> RawBody:
    record = {"attempt": attempt, "action": action, "reason": "NodeLost", "message": "lost"}
    return build_job(attempts=[record], restarts=restarts)


def observe(*bodies: RawBody, state: SoakState | None = None) -> SoakState:
    """Deliver jobs and pods as new objects."""
    state = state or SoakState()
    for body in bodies:
        if "numNodes" in body["spec"]:
            state.on_job_event(None, body)
        else:
            state.on_pod_event(None, body)
    return state


def test_attempt_runs_if_all_its_pods_run() -> None:
    state = observe(build_job(), running_pod(job(), 0))
    assert state.find_running_attempt(PLAN) is None

    observe(running_pod(job(), 1), state=state)

    assert state.find_running_attempt(PLAN) == (UID, 0)
    assert state.running_at.keys() == {(UID, 0)}
    assert state.problems == []


@pytest.mark.parametrize(
    ("older", "runs_beside"),
    [
        pytest.param(running_pod(job(), 0), True, id="running"),
        pytest.param(terminating_pod(running_pod(job(), 0), deadline=NOW + timedelta(days=9999)), True, id="in grace"),
        pytest.param(terminating_pod(running_pod(job(), 0)), False, id="grace period over"),
        pytest.param(pod(job(), 0, phase="Failed"), False, id="ended"),
    ],
)
def test_no_attempt_runs_beside_an_older_one(older: RawBody, runs_beside: bool) -> None:
    state = observe(build_job(), older, running_pod(job(), 0, attempt=1))

    assert state.problems == (["bert-1-0 runs beside bert-0-0"] if runs_beside else [])


def test_pod_on_a_removed_node_explains_the_end_of_its_attempt_and_blocks_no_other() -> None:
    state = SoakState()
    state.missing_nodes.add("gpu-0")
    observe(build_job(), running_pod(job(), 0), running_pod(job(), 0, attempt=1), state=state)

    assert state.problems == []
    assert state.causes[UID, 0] == [NODE_LOSS]


def test_pods_with_different_specs_in_one_attempt_are_noticed() -> None:
    other = running_pod(job(), 1)
    shm = next(volume for volume in other["spec"]["volumes"] if volume["name"] == "shm")
    shm["emptyDir"]["sizeLimit"] = "7"
    state = observe(build_job(), running_pod(job(), 0), other)

    assert state.problems == ["bert-0-0 and bert-0-1 have different specs"]


def test_another_image_in_a_later_attempt_is_noticed() -> None:
    later = pod(job(), 0, attempt=1)
    later["spec"]["containers"][0]["image"] = "registry.example/trainer:v2"
    state = observe(build_job(), pod(job(), 0), later)

    [problem] = state.problems
    assert problem.startswith("bert-1-0 has the image registry.example/trainer:v2, its job began with ")


def test_pod_of_a_stranger_with_the_labels_of_a_job_is_ignored() -> None:
    stranger = running_pod(job(), 0, attempt=1)
    stranger["metadata"] |= {"ownerReferences": [], "name": "stranger"}
    state = observe(build_job(), running_pod(job(), 0), stranger)

    assert state.problems == []


@pytest.mark.parametrize("action", ["Restart", "Repair", "Fail", "Suspend"])
def test_end_of_an_attempt_without_a_cause_is_noticed(action: str) -> None:
    state = observe(ended_attempt(action=action))
    [problem] = state.list_unexplained_failures()
    assert problem == f"bert attempt 0 ended without a cause: NodeLost, action {action}, lost"

    state.add_cause((UID, 0), SUSPENSION)

    assert state.list_unexplained_failures() == []


def test_suspension_needs_the_cause_of_a_suspension() -> None:
    state = observe(ended_attempt(action="Suspend"))
    state.add_cause((UID, 0), NODE_LOSS)

    assert len(state.list_unexplained_failures()) == 1


def test_more_restarts_than_causes_are_noticed() -> None:
    state = observe(ended_attempt(action="Restart", restarts=2))
    state.add_cause((UID, 0), NODE_LOSS)
    state.add_cause((UID, 1), SUSPENSION)

    assert state.list_wrong_restart_counts() == ["bert counts 2 restarts, but only 1 attempts were ended"]


def test_final_state_remains_after_the_deletion_of_the_job() -> None:
    body = finished("Complete", "Completed")
    state = observe(body)
    state.on_job_event(body, None)

    assert state.find_final_state("bert") == ("Complete", "Completed")


def test_recreated_job_has_no_final_state() -> None:
    state = observe(build_job())
    state.on_job_event(build_job(), None)
    assert state.find_final_state("bert") == ("Deleted", "")

    observe(build_job(uid="other"), state=state)

    assert state.find_final_state("bert") is None


def test_final_state_that_changes_is_noticed() -> None:
    state = observe(finished("Complete", "Completed"), finished("Failed", "NodeLost"))

    assert state.problems == ["bert changed from ('Complete', 'Completed') to ('Failed', 'NodeLost') after its end"]


def test_late_deletion_of_an_old_pod_keeps_the_pod_of_the_same_name() -> None:
    old, new = running_pod(job(), 0), running_pod(job(), 0)
    new["metadata"]["uid"] = "new"
    state = observe(build_job(), old, new)
    state.on_pod_event(old, None)

    assert state.pods["bert-0-0"] == new
    assert names.ATTEMPT in new["metadata"]["labels"]
