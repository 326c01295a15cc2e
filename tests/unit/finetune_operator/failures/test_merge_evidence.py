"""Tests of collecting and merging the evidence of a stopping attempt."""

import json
from datetime import timedelta
from typing import Any

import pytest

from finetune_api.termination import Outcome
from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, Evidence
from finetune_operator.failures.merge_evidence import collect_initial_evidence, merge_evidence
from finetune_operator.failures.rules import judge
from finetune_operator.observation.pods import NodeObservation, observe_pods
from testing.builders.jobs import NOW, RawBody, finished_pod, job, running_pod, terminating_pod
from testing.builders.stopping import build_disrupted_pod

JOB = job()
RECORD = AttemptRecord(attempt=0, state=AttemptState.RUNNING, created=True)
DEADLINE = NOW + timedelta(seconds=10)


def termination_message(outcome: Outcome = Outcome.FAILED, **fields: Any) -> str:
    return json.dumps({"final": True, "outcome": outcome, "time": NOW.timestamp(), **fields})


def observe_nodes(*pods: RawBody, tombstones: tuple[RawBody, ...] = ()) -> tuple[NodeObservation, ...]:
    return observe_pods(pods, tombstones)


def killed_pod(*, seconds: int) -> RawBody:
    """Return a terminating pod that was killed `seconds` after NOW, without a termination message."""
    finished = (NOW + timedelta(seconds=seconds)).isoformat()
    return terminating_pod(finished_pod(JOB, 0, exit_code=137, finishedAt=finished), deadline=DEADLINE)


def collect_evidence(
    *pods: RawBody, tombstones: tuple[RawBody, ...] = (), record: AttemptRecord = RECORD
) -> tuple[Evidence, ...]:
    return collect_initial_evidence(record, observe_nodes(*pods, tombstones=tombstones), 2)


def merge_observed_evidence(first_pod: RawBody, second_pod: RawBody) -> Evidence:
    """Return the evidence of node 0 after observing two states of its pod."""
    [evidence] = merge_evidence(
        collect_initial_evidence(RECORD, observe_nodes(first_pod), 1), observe_nodes(second_pod)
    )
    return evidence


def test_evidence_includes_nodes_removed_from_the_spec() -> None:
    fewer = collect_initial_evidence(RECORD, observe_nodes(running_pod(JOB, 1)), 1)
    assert [evidence.node_rank for evidence in fewer] == [0, 1]


def test_replicas_with_different_observations_converge_to_the_same_evidence() -> None:
    tainted = build_disrupted_pod(terminating_pod(running_pod(JOB, 0)), "DeletionByTaintManager")
    collected = build_disrupted_pod(terminating_pod(running_pod(JOB, 0)), "DeletionByPodGC")
    recorded = collect_initial_evidence(RECORD, observe_nodes(tainted), 1)

    merged = merge_evidence(recorded, observe_nodes(tombstones=(collected,)))
    assert (merged[0].disruption, merged[0].ended) == ("DeletionByTaintManager", True)
    assert merge_evidence(merged, observe_nodes(tainted)) == merged


def test_a_pod_that_was_never_created_is_not_the_root_cause() -> None:
    half_created = RECORD.model_copy(update={"created": False})
    evicted = build_disrupted_pod(terminating_pod(running_pod(JOB, 1)), "EvictionByEvictionAPI")

    verdict = judge(collect_evidence(evicted, record=half_created))

    assert verdict is not None
    assert (verdict.reason, verdict.evidence and verdict.evidence.node_rank) == ("Preempted", 1)


def test_evidence_is_added_for_a_pod_that_is_found_late() -> None:
    """The pod lost its labels before it was observed, so it is found by name only when the attempt is judged."""
    half_created = RECORD.model_copy(update={"created": False})
    recorded = collect_evidence(finished_pod(JOB, 0, message=termination_message(victim=True)), record=half_created)

    merged = merge_evidence(
        recorded,
        observe_nodes(
            finished_pod(JOB, 0, message=termination_message(victim=True)), finished_pod(JOB, 1, exit_code=137)
        ),
    )

    verdict = judge(merged)
    assert verdict is not None
    assert (verdict.evidence and verdict.evidence.node_rank, verdict.victim) == (1, False)


def test_deletion_of_a_pod_that_is_found_late_is_not_attributed_to_the_operator() -> None:
    half_created = RECORD.model_copy(update={"created": False})
    victim = finished_pod(JOB, 1, message=termination_message(victim=True))
    stopped = terminating_pod(finished_pod(JOB, 0, message=termination_message(Outcome.STOPPED)))

    merged = merge_evidence(collect_evidence(victim, record=half_created), observe_nodes(victim, tombstones=(stopped,)))

    verdict = judge(merged)
    assert verdict is not None
    assert (verdict.reason, verdict.evidence and verdict.evidence.node_rank) == ("PodDeleted", 0)


@pytest.mark.parametrize(
    ("pods", "tombstones", "is_deleted"),
    [
        pytest.param((running_pod(JOB, 0),), (), False, id="running"),
        pytest.param((terminating_pod(running_pod(JOB, 0)),), (), True, id="terminating"),
        pytest.param((), (running_pod(JOB, 0),), True, id="deleted"),
        pytest.param(
            (terminating_pod(finished_pod(JOB, 0, message=termination_message())),),
            (),
            False,
            id="failed before its deletion",
        ),
        pytest.param(
            (),
            (finished_pod(JOB, 0, exit_code=0, message=termination_message(Outcome.SUCCEEDED)),),
            False,
            id="succeeded before its deletion",
        ),
        pytest.param(
            (terminating_pod(finished_pod(JOB, 0, message=termination_message(Outcome.STOPPED))),),
            (),
            True,
            id="stopped",
        ),
    ],
)
def test_deletion_before_the_stop_is_not_attributed_to_the_operator(
    pods: tuple[RawBody, ...], tombstones: tuple[RawBody, ...], is_deleted: bool
) -> None:
    assert collect_evidence(*pods, tombstones=tombstones)[0].deleted is is_deleted


def test_recorded_evidence_is_kept_without_a_new_observation() -> None:
    recorded = collect_evidence(finished_pod(JOB, 0, message=termination_message()), running_pod(JOB, 1))
    assert merge_evidence(recorded, ()) == recorded


def test_observed_termination_is_not_overwritten() -> None:
    ended = finished_pod(JOB, 0, message=termination_message(errorType="KeyError"))
    for later_pod in (running_pod(JOB, 0), terminating_pod(running_pod(JOB, 0)), finished_pod(JOB, 0, exit_code=137)):
        assert merge_observed_evidence(ended, later_pod) == collect_evidence(ended)[0]


def test_an_observed_exit_code_is_not_overwritten() -> None:
    recorded = terminating_pod(finished_pod(JOB, 0, message=termination_message(Outcome.STOPPED)))
    assert collect_evidence(recorded)[0].deleted
    assert merge_observed_evidence(recorded, terminating_pod(running_pod(JOB, 0))) == collect_evidence(recorded)[0]


def test_later_termination_message_is_added_to_the_evidence_of_a_deleted_node() -> None:
    merged = merge_observed_evidence(
        terminating_pod(running_pod(JOB, 0)),
        terminating_pod(finished_pod(JOB, 0, exit_code=143, message=termination_message(Outcome.STOPPED))),
    )
    assert (merged.deleted, merged.exit_code, merged.outcome) == (True, 143, Outcome.STOPPED)


@pytest.mark.parametrize(
    ("second_pod", "outcome"),
    [
        pytest.param(running_pod(JOB, 0), "", id="running"),
        pytest.param(terminating_pod(running_pod(JOB, 0)), Outcome.STOPPED, id="terminating"),
        pytest.param(
            terminating_pod(finished_pod(JOB, 0, message=termination_message(Outcome.STOPPED))),
            Outcome.STOPPED,
            id="stopped",
        ),
        pytest.param(killed_pod(seconds=10), Outcome.STOPPED, id="killed at the end of the grace period"),
        pytest.param(killed_pod(seconds=9), "", id="killed within the grace period"),
        pytest.param(
            terminating_pod(finished_pod(JOB, 0, message=termination_message())),
            Outcome.FAILED,
            id="failed before its deletion",
        ),
        pytest.param(finished_pod(JOB, 0, exit_code=137), "", id="ended without a deletion"),
    ],
)
def test_a_node_stopped_by_the_operator_has_outcome_stopped(second_pod: RawBody, outcome: str) -> None:
    assert merge_observed_evidence(running_pod(JOB, 0), second_pod).outcome == outcome


@pytest.mark.parametrize(
    ("first_pod", "second_pod", "disruption"),
    [
        pytest.param(
            running_pod(JOB, 0),
            build_disrupted_pod(terminating_pod(running_pod(JOB, 0)), "EvictionByEvictionAPI"),
            "",
            id="eviction after deletion by the operator",
        ),
        pytest.param(
            running_pod(JOB, 0),
            build_disrupted_pod(terminating_pod(running_pod(JOB, 0)), "DeletionByTaintManager"),
            "DeletionByTaintManager",
            id="Kubernetes node lost after deletion by the operator",
        ),
        pytest.param(
            build_disrupted_pod(terminating_pod(running_pod(JOB, 0)), "EvictionByEvictionAPI"),
            terminating_pod(running_pod(JOB, 0)),
            "EvictionByEvictionAPI",
            id="recorded disruption",
        ),
        pytest.param(
            terminating_pod(running_pod(JOB, 0)),
            build_disrupted_pod(terminating_pod(running_pod(JOB, 0)), "PreemptionByScheduler"),
            "PreemptionByScheduler",
            id="late disruption of a deletion not by the operator",
        ),
    ],
)
def test_disruption_after_a_deletion_by_the_operator_is_ignored_unless_the_node_is_lost(
    first_pod: RawBody, second_pod: RawBody, disruption: str
) -> None:
    assert merge_observed_evidence(first_pod, second_pod).disruption == disruption
