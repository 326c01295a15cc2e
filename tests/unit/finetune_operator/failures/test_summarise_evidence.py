"""Tests that the stored part of the evidence leads to the same verdict as all evidence."""

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune_api.termination import Outcome
from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, Evidence
from finetune_operator.failures import summarise_evidence
from finetune_operator.failures.merge_evidence import collect_initial_evidence, merge_evidence
from finetune_operator.failures.rules import judge
from finetune_operator.failures.summarise_evidence import (
    count_nodes,
    format_ranks,
    measure_evidence_bytes,
    parse_ranks,
    restore_evidence,
    store_evidence,
)
from finetune_operator.observation.pods import NodeObservation, PodPhase

START = datetime(2026, 1, 1, 12, tzinfo=UTC)
Trajectory = tuple[NodeObservation | None, ...]  # observations of one node, in the order of the passes
MESSAGES = (
    "RuntimeError: CUDA error: out of memory",
    "训练失败：显存不足",
    "ValueError: 😀",
    "Connection closed by peer",
)
PASSES = 4


def observe(rank: int, phase: PodPhase, *, deleted: bool = False, **evidence: object) -> NodeObservation:
    fields = {"pod_name": f"bert-0-{rank}", "k8s_node": f"gpu-{rank}", "ended": phase is not PodPhase.RUNNING}
    return NodeObservation(
        attempt=0,
        node_rank=rank,
        pod_name=f"bert-0-{rank}",
        uid=f"pod-{rank}",
        phase=phase,
        is_terminating=deleted,
        deletion_deadline=START + timedelta(seconds=30) if deleted else None,
        is_scheduled=True,
        waiting=None,
        evidence=Evidence(node_rank=rank, **{**fields, **evidence}),
        termination=None,
    )


def draw_trajectory(draw: random.Random, rank: int) -> Trajectory:
    """Return the observations of a node that may be deleted or disrupted, then ends, then disappears."""
    running = observe(rank, PodPhase.RUNNING)
    disruption = draw.choice(
        ("", "", "", "EvictionByEvictionAPI", "DeletionByTaintManager", "WorkloadEvictedDueToPreempted")
    )
    is_deleted = bool(disruption) or draw.random() < 0.3
    fields = draw.choice(
        (
            {"outcome": Outcome.FAILED.value, "error_type": "ValueError", "exit_code": 1},
            {"outcome": Outcome.FAILED.value, "error_type": "DistBackendError", "victim": True, "exit_code": 1},
            {"outcome": Outcome.STOPPED.value, "exit_code": 143},
            {"outcome": Outcome.SUCCEEDED.value, "exit_code": 0},
            {"reason": "OOMKilled", "exit_code": 137},
            {"exit_code": 137},
        )
    )
    end: dict[str, object] = {"message": draw.choice(MESSAGES), "disruption": disruption, **fields}
    if draw.random() < 0.9:
        end["finished_at"] = START + timedelta(seconds=draw.randrange(5))
    terminating = observe(rank, PodPhase.RUNNING, deleted=is_deleted, disruption=disruption)
    phase = PodPhase.SUCCEEDED if fields["exit_code"] == 0 else PodPhase.FAILED
    ended = observe(rank, phase, deleted=is_deleted, **end)
    stages: list[NodeObservation | None] = [running, terminating, ended, replace(ended, phase=PodPhase.GONE)]
    if draw.random() < 0.1:
        stages = [None, *stages[1:]]
    positions = sorted(draw.randrange(len(stages)) for _ in range(PASSES))
    return tuple(stages[position] for position in positions)


@pytest.mark.parametrize("limits", [(32, 16, 8), (2, 1)])
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), num_nodes=st.integers(1, 150), created=st.booleans())
def test_verdict_of_the_stored_evidence_is_that_of_all_evidence(
    limits: tuple[int, ...], seed: int, num_nodes: int, created: bool
) -> None:
    draw = random.Random(seed)
    trajectories = [draw_trajectory(draw, rank) for rank in range(num_nodes)]
    record = AttemptRecord(attempt=0, state=AttemptState.STOPPING, created=created)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summarise_evidence, "LIMITS", limits)
        everything: tuple[Evidence, ...] = ()
        for number in range(PASSES):
            nodes = tuple(node for each in trajectories if (node := each[number]) is not None)
            if number == 0:
                everything = collect_initial_evidence(record, nodes, num_nodes)
                from_stored = everything
            else:
                everything = merge_evidence(everything, nodes)
                from_stored = merge_evidence(restore_evidence(record, "bert"), nodes)
            assert judge(from_stored) == judge(everything)
            record = store_evidence(record.model_copy(update={"evidence": from_stored}))
            assert count_nodes(record) == num_nodes
            assert len(record.evidence) <= max(2 * limits[0], limits[-1])


def test_a_thousand_nodes_with_long_messages_are_stored_in_48_kib() -> None:
    evidence = tuple(
        Evidence(
            node_rank=rank, pod_name="p" * 63, k8s_node="k" * 253, ended=True, outcome="failed", message="训" * 266
        )
        for rank in range(1000)
    )
    record = store_evidence(AttemptRecord(attempt=0, state=AttemptState.STOPPING, evidence=evidence))

    assert measure_evidence_bytes(record.evidence) <= 48 * 1024
    assert [summary.ranks for summary in record.evidence_summary] == [f"{len(record.evidence)}-999"]


def test_evidence_of_a_small_job_is_stored_without_summaries() -> None:
    evidence = tuple(Evidence(node_rank=rank, pod_name=f"bert-0-{rank}") for rank in range(8))
    record = AttemptRecord(attempt=0, state=AttemptState.STOPPING, evidence=evidence)

    assert store_evidence(record) == record
    assert restore_evidence(record, "bert") == evidence


@given(ranks=st.sets(st.integers(0, 999), min_size=1).map(sorted))
def test_ranks_are_restored_from_their_ranges(ranks: list[int]) -> None:
    assert parse_ranks(format_ranks(ranks)) == ranks
