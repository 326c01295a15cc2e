"""Tests of jobs whose number of nodes changes while they are suspended."""

import pytest

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.status import AttemptState
from finetune_operator.core.actions import Create, DeletePod
from testing.builders.jobs import decide_with, finished_pod, job, running_pod
from testing.builders.stopping import build_running_job


def resize(ftjob: FineTuneJob, num_nodes: int) -> FineTuneJob:
    return ftjob.model_copy(update={"spec": job(numNodes=num_nodes).spec})


@pytest.mark.parametrize("num_nodes", [1, 4])
def test_an_attempt_of_another_size_is_stopped_and_started_again_with_the_new_size(num_nodes: int) -> None:
    """The job was suspended, changed and resumed while no operator ran."""
    ftjob = build_running_job(numNodes=2)
    pods = [running_pod(ftjob, rank) for rank in range(2)]
    stopped_pods = [finished_pod(ftjob, rank, exit_code=143) for rank in range(2)]

    stopping, _ = decide_with(resize(ftjob, num_nodes), *pods)
    _, deletion = decide_with(stopping, *pods)
    stopped, _ = decide_with(stopping, *stopped_pods)
    restarted, _ = decide_with(stopped, *stopped_pods)
    _, creation = decide_with(restarted, *stopped_pods)

    first, second = restarted.status.attempts
    assert [evidence.node_rank for evidence in stopping.status.attempts[-1].evidence] == [0, 1]
    assert {action.name for action in deletion.actions if isinstance(action, DeletePod)} == {"bert-0-0", "bert-0-1"}
    assert (first.state, first.num_nodes, second.num_nodes) == (AttemptState.STOPPED, 2, num_nodes)
    created = [action.manifest for action in creation.actions if isinstance(action, Create)]
    assert sum(manifest["kind"] == "Pod" for manifest in created) == num_nodes
    assert restarted.status.restarts == 0


def test_a_node_of_a_shrunk_job_that_is_not_observed_is_still_one_of_its_attempt() -> None:
    ftjob = build_running_job(numNodes=3)

    stopping, _ = decide_with(resize(ftjob, 1), running_pod(ftjob, 0))

    assert len(stopping.status.attempts[-1].evidence) == 3


def test_a_suspended_job_shows_the_number_of_nodes_of_its_spec() -> None:
    ftjob = build_running_job(numNodes=2)
    stopped_pods = [finished_pod(ftjob, rank, exit_code=143) for rank in range(2)]
    suspended = ftjob.model_copy(update={"spec": job(numNodes=2, suspend=True).spec})
    for _ in range(2):
        suspended, _ = decide_with(suspended, *stopped_pods)

    resized = suspended.model_copy(update={"spec": job(numNodes=4, suspend=True).spec})
    after, _ = decide_with(resized)

    assert suspended.status.attempts[-1].state is AttemptState.STOPPED
    assert after.status.display is not None
    assert after.status.display.nodes == "0/4"


def test_the_number_of_nodes_of_an_attempt_of_an_older_release_is_that_of_the_spec() -> None:
    ftjob = build_running_job(numNodes=2)
    record = ftjob.status.attempts[-1].model_copy(update={"num_nodes": None})
    status = ftjob.status.model_copy(update={"attempts": (record,)})

    assert ftjob.model_copy(update={"status": status}).num_attempt_nodes == 2
