"""Tests of the delay of status writes that only change displayed fields."""

from datetime import timedelta

import pytest

from finetune_api.v1alpha1.status import AttemptState, Evidence, JobStatus, Phase, Progress
from finetune_operator.core.write_delay import (
    MAX_UNRECORDED_RUN,
    RUNNING_WRITE_INTERVAL,
    WRITE_INTERVAL,
    compute_write_delay,
)
from finetune_operator.observation.ownership import RawBody
from testing.builders.jobs import NOW, build_observation, finished_pod, job, pod, running_pod, terminating_pod
from testing.builders.statuses import build_status_with_attempts, derive_later_status

JOB = job()
SECOND = timedelta(seconds=1)


def compute_delay(
    before: JobStatus, after: JobStatus, *pods: RawBody, since_write: timedelta = SECOND, run_time: timedelta = SECOND
) -> timedelta | None:
    """Return the delay of the write `run_time` after the pods started."""
    nodes = build_observation(JOB, *pods).nodes
    return compute_write_delay(before, after, nodes, NOW + run_time, since_write=since_write)


def test_progress_columns_nodes_and_steps_are_written_after_an_interval() -> None:
    before = derive_later_status(build_status_with_attempts(AttemptState.RUNNING), running_pod(JOB, 0))
    [record] = before.attempts
    steps = record.model_copy(
        update={"first_step": 0, "first_step_time": NOW, "last_step": 9, "evidence": (Evidence(node_rank=0),)}
    )
    after = before.model_copy(update={"attempts": (steps,), "nodes": (), "display": None, "progress": Progress(step=9)})
    assert before.phase is Phase.RUNNING
    assert compute_delay(before, after) == RUNNING_WRITE_INTERVAL - SECOND
    assert compute_delay(before, after, since_write=RUNNING_WRITE_INTERVAL) is None


@pytest.mark.parametrize(
    ("outcome", "delay"),
    [
        pytest.param("failed", None, id="possible root cause"),
        pytest.param("stopped", WRITE_INTERVAL - SECOND, id="stopped by the operator"),
    ],
)
def test_evidence_of_a_failure_is_written_at_once(outcome: str, delay: timedelta | None) -> None:
    before = build_status_with_attempts(AttemptState.STOPPING)
    end = Evidence(node_rank=0, ended=True, outcome=outcome)
    after = build_status_with_attempts(AttemptState.STOPPING, evidence=(end,))
    assert compute_delay(before, after) == delay


@pytest.mark.parametrize(
    ("node", "run_time", "delay"),
    [
        pytest.param(pod(JOB, 1), SECOND, MAX_UNRECORDED_RUN - SECOND, id="another node is pending"),
        pytest.param(
            running_pod(JOB, 1, started_at=NOW), SECOND, MAX_UNRECORDED_RUN - SECOND, id="all nodes have just started"
        ),
        pytest.param(running_pod(JOB, 1, started_at=NOW), MAX_UNRECORDED_RUN, None, id="a node has run for a while"),
        pytest.param(running_pod(JOB, 1, started_at=NOW), -SECOND, None, id="the clock of a node is fast"),
        pytest.param(terminating_pod(running_pod(JOB, 1, started_at=NOW)), SECOND, None, id="a node is being deleted"),
        pytest.param(finished_pod(JOB, 1), SECOND, None, id="a node has failed"),
    ],
)
def test_creation_of_all_pods_is_recorded_before_a_node_can_write_output(
    node: RawBody, run_time: timedelta, delay: timedelta | None
) -> None:
    before = build_status_with_attempts(AttemptState.STARTING)
    after = build_status_with_attempts(AttemptState.STARTING, created=True, pod_uids="aaaaaaaabbbbbbbb")
    assert compute_delay(before, after, running_pod(JOB, 0, started_at=NOW), node, run_time=run_time) == delay


def test_creation_of_all_pods_is_recorded_after_an_interval_if_none_starts() -> None:
    before = build_status_with_attempts(AttemptState.STARTING)
    after = build_status_with_attempts(AttemptState.STARTING, created=True, pod_uids="aaaaaaaabbbbbbbb")
    assert compute_delay(before, after, pod(JOB, 0), pod(JOB, 1)) == WRITE_INTERVAL - SECOND
    assert compute_delay(before, after, pod(JOB, 0), pod(JOB, 1), since_write=WRITE_INTERVAL) is None


def test_a_running_attempt_is_recorded_at_once() -> None:
    before = build_status_with_attempts(AttemptState.STARTING)
    after = build_status_with_attempts(AttemptState.RUNNING, created=True)
    assert compute_delay(before, after, running_pod(JOB, 0), running_pod(JOB, 1)) is None
