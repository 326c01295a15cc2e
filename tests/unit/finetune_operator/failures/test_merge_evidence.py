"""Evidence of the nodes of a stopping attempt, its step range and its downtime."""

import json
from datetime import timedelta
from typing import Any

import pytest

from finetune_api.termination import Outcome
from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, Evidence
from finetune_operator.failures.merge_evidence import collect_initial_evidence, merge_evidence
from finetune_operator.failures.rules import judge
from finetune_operator.observation.pods import NodeObservation, observe_pods
from testing.builders.jobs import NOW, RawBody, ended_pod, job, running_pod, terminating_pod
from testing.builders.stopping import disrupted_pod

JOB = job()
RECORD = AttemptRecord(attempt=0, state=AttemptState.RUNNING, created=True)
DEADLINE = NOW + timedelta(seconds=10)


def termination_message(outcome: Outcome = Outcome.FAILED, **fields: Any) -> str:
    return json.dumps({"final": True, "outcome": outcome, "time": NOW.timestamp(), **fields})


def nodes(*pods: RawBody, gone: tuple[RawBody, ...] = ()) -> tuple[NodeObservation, ...]:
    return observe_pods(pods, gone)


def killed_pod(*, seconds: int) -> RawBody:
    """Return a terminating pod that SIGKILL ended after `seconds`, without a termination message."""
    finished = (NOW + timedelta(seconds=seconds)).isoformat()
    return terminating_pod(ended_pod(JOB, 0, exit_code=137, finishedAt=finished), deadline=DEADLINE)


def initial_evidence(
    *pods: RawBody, gone: tuple[RawBody, ...] = (), record: AttemptRecord = RECORD
) -> tuple[Evidence, ...]:
    return collect_initial_evidence(record, nodes(*pods, gone=gone), 2)


def merged_evidence(recorded: RawBody, now: RawBody) -> Evidence:
    """Return the evidence of node 0 after a second observation."""
    [evidence] = merge_evidence(collect_initial_evidence(RECORD, nodes(recorded), 1), nodes(now))
    return evidence


def test_every_node_has_evidence() -> None:
    assert [evidence.node_rank for evidence in initial_evidence(running_pod(JOB, 0))] == [0, 1]
    assert [evidence.node_rank for evidence in initial_evidence()] == [0, 1]


def test_nodes_removed_from_the_spec_have_evidence() -> None:
    fewer = collect_initial_evidence(RECORD, nodes(running_pod(JOB, 1)), 1)
    assert [evidence.node_rank for evidence in fewer] == [0, 1]


def test_a_created_pod_that_is_missing_was_deleted() -> None:
    assert initial_evidence(running_pod(JOB, 0))[1] == Evidence(node_rank=1, ended=True, deleted=True)


def test_evidence_converges_between_replicas_with_different_observations() -> None:
    tainted = disrupted_pod(terminating_pod(running_pod(JOB, 0)), "DeletionByTaintManager")
    collected = disrupted_pod(terminating_pod(running_pod(JOB, 0)), "DeletionByPodGC")
    recorded = collect_initial_evidence(RECORD, nodes(tainted), 1)

    merged = merge_evidence(recorded, nodes(gone=(collected,)))
    assert (merged[0].disruption, merged[0].ended) == ("DeletionByTaintManager", True)
    assert merge_evidence(merged, nodes(tainted)) == merged


def test_a_pod_that_was_never_created_is_not_the_root_cause() -> None:
    half_created = RECORD.model_copy(update={"created": False})
    evicted = disrupted_pod(terminating_pod(running_pod(JOB, 1)), "EvictionByEvictionAPI")

    verdict = judge(initial_evidence(evicted, record=half_created))

    assert verdict is not None
    assert (verdict.reason, verdict.evidence and verdict.evidence.node_rank) == ("Preempted", 1)


def test_a_pod_found_after_it_was_assumed_never_created_adds_its_evidence() -> None:
    """Its labels were edited before it was recorded; it is found by name when the attempt is judged."""
    half_created = RECORD.model_copy(update={"created": False})
    recorded = initial_evidence(ended_pod(JOB, 0, message=termination_message(victim=True)), record=half_created)

    merged = merge_evidence(
        recorded, nodes(ended_pod(JOB, 0, message=termination_message(victim=True)), ended_pod(JOB, 1, exit_code=137))
    )

    verdict = judge(merged)
    assert verdict is not None
    assert (verdict.evidence and verdict.evidence.node_rank, verdict.victim) == (1, False)


def test_a_deleted_pod_that_was_assumed_never_created_was_not_deleted_by_the_operator() -> None:
    half_created = RECORD.model_copy(update={"created": False})
    victim = ended_pod(JOB, 1, message=termination_message(victim=True))
    stopped = terminating_pod(ended_pod(JOB, 0, message=termination_message(Outcome.STOPPED)))

    merged = merge_evidence(initial_evidence(victim, record=half_created), nodes(victim, gone=(stopped,)))

    verdict = judge(merged)
    assert verdict is not None
    assert (verdict.reason, verdict.evidence and verdict.evidence.node_rank) == ("PodDeleted", 0)


@pytest.mark.parametrize(
    ("pods", "gone", "deleted"),
    [
        pytest.param((running_pod(JOB, 0),), (), False, id="running"),
        pytest.param((terminating_pod(running_pod(JOB, 0)),), (), True, id="terminating"),
        pytest.param((), (running_pod(JOB, 0),), True, id="deleted"),
        pytest.param(
            (terminating_pod(ended_pod(JOB, 0, message=termination_message())),),
            (),
            False,
            id="failed before its deletion",
        ),
        pytest.param(
            (),
            (ended_pod(JOB, 0, exit_code=0, message=termination_message(Outcome.SUCCEEDED)),),
            False,
            id="succeeded before its deletion",
        ),
        pytest.param(
            (terminating_pod(ended_pod(JOB, 0, message=termination_message(Outcome.STOPPED))),), (), True, id="stopped"
        ),
    ],
)
def test_a_pod_deleted_before_the_attempt_stops_was_not_deleted_by_the_operator(
    pods: tuple[RawBody, ...], gone: tuple[RawBody, ...], deleted: bool
) -> None:
    assert initial_evidence(*pods, gone=gone)[0].deleted is deleted


def test_a_missing_observation_keeps_the_recorded_evidence() -> None:
    recorded = initial_evidence(ended_pod(JOB, 0, message=termination_message()), running_pod(JOB, 1))
    assert merge_evidence(recorded, ()) == recorded


def test_an_observed_end_is_not_overwritten() -> None:
    ended = ended_pod(JOB, 0, message=termination_message(errorType="KeyError"))
    for later_pod in (running_pod(JOB, 0), terminating_pod(running_pod(JOB, 0)), ended_pod(JOB, 0, exit_code=137)):
        assert merged_evidence(ended, later_pod) == initial_evidence(ended)[0]


def test_an_observed_exit_code_is_not_overwritten() -> None:
    recorded = terminating_pod(ended_pod(JOB, 0, message=termination_message(Outcome.STOPPED)))
    assert initial_evidence(recorded)[0].deleted
    assert merged_evidence(recorded, terminating_pod(running_pod(JOB, 0))) == initial_evidence(recorded)[0]


def test_a_later_termination_message_is_added_to_a_deleted_node() -> None:
    merged = merged_evidence(
        terminating_pod(running_pod(JOB, 0)),
        terminating_pod(ended_pod(JOB, 0, exit_code=143, message=termination_message(Outcome.STOPPED))),
    )
    assert (merged.deleted, merged.exit_code, merged.outcome) == (True, 143, Outcome.STOPPED)


@pytest.mark.parametrize(
    ("now", "outcome"),
    [
        pytest.param(running_pod(JOB, 0), "", id="running"),
        pytest.param(terminating_pod(running_pod(JOB, 0)), Outcome.STOPPED, id="terminating"),
        pytest.param(
            terminating_pod(ended_pod(JOB, 0, message=termination_message(Outcome.STOPPED))),
            Outcome.STOPPED,
            id="stopped",
        ),
        pytest.param(killed_pod(seconds=10), Outcome.STOPPED, id="killed at the end of the grace period"),
        pytest.param(killed_pod(seconds=9), "", id="killed within the grace period"),
        pytest.param(
            terminating_pod(ended_pod(JOB, 0, message=termination_message())),
            Outcome.FAILED,
            id="failed before its deletion",
        ),
        pytest.param(ended_pod(JOB, 0, exit_code=137), "", id="ended without a deletion"),
    ],
)
def test_a_node_stopped_by_the_operator_has_outcome_stopped(now: RawBody, outcome: str) -> None:
    assert merged_evidence(running_pod(JOB, 0), now).outcome == outcome


@pytest.mark.parametrize(
    ("before", "now", "disruption"),
    [
        pytest.param(
            running_pod(JOB, 0),
            disrupted_pod(terminating_pod(running_pod(JOB, 0)), "EvictionByEvictionAPI"),
            "",
            id="eviction after our deletion",
        ),
        pytest.param(
            running_pod(JOB, 0),
            disrupted_pod(terminating_pod(running_pod(JOB, 0)), "DeletionByTaintManager"),
            "DeletionByTaintManager",
            id="Kubernetes node lost after our deletion",
        ),
        pytest.param(
            disrupted_pod(terminating_pod(running_pod(JOB, 0)), "EvictionByEvictionAPI"),
            terminating_pod(running_pod(JOB, 0)),
            "EvictionByEvictionAPI",
            id="recorded disruption",
        ),
        pytest.param(
            terminating_pod(running_pod(JOB, 0)),
            disrupted_pod(terminating_pod(running_pod(JOB, 0)), "PreemptionByScheduler"),
            "PreemptionByScheduler",
            id="late disruption of a foreign deletion",
        ),
    ],
)
def test_a_disruption_explains_only_deletions_by_others(before: RawBody, now: RawBody, disruption: str) -> None:
    assert merged_evidence(before, now).disruption == disruption
