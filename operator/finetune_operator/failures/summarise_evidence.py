"""Bounds the stored evidence of a stopping attempt without changing its verdict (decisions/409).

The status contains the evidence of the most relevant nodes. All other nodes are grouped by the fields that
failures.merge_evidence and failures.rules read, so that later passes continue as if all evidence was stored.
"""

from collections.abc import Iterable

from finetune_api.termination import Outcome
from finetune_api.v1alpha1.status import AttemptRecord, Evidence, EvidenceSummary
from finetune_operator import names
from finetune_operator.failures.merge_evidence import RELABELLED, is_final
from finetune_operator.failures.rules import (
    DISRUPTION_MESSAGES,
    evicted_by_kueue,
    has_succeeded,
    judge_node,
    select_most_relevant,
)

LIMITS = (32, 16, 8)  # number of nodes whose evidence is stored, for nodes with and without final evidence
MAX_STORED_BYTES = 48 * 1024


def store_evidence(record: AttemptRecord) -> AttemptRecord:
    """Return the record with the evidence of at most 64 nodes, and with summaries of the others."""
    evidence = record.evidence
    if len(evidence) <= LIMITS[-1]:
        return record.model_copy(update={"evidence_summary": ()})
    final_evidence = tuple(each for each in evidence if is_final(each))
    open_evidence = tuple(each for each in evidence if not is_final(each))
    stored: tuple[Evidence, ...] = ()
    for limit in LIMITS:
        stored = tuple(
            each for group in (final_evidence, open_evidence) for each in select_most_relevant(group, limit=limit)
        )
        if measure_evidence_bytes(stored) <= MAX_STORED_BYTES:
            break
    stored_ranks = {each.node_rank for each in stored}
    others = (each for each in evidence if each.node_rank not in stored_ranks)
    stored = tuple(sorted(stored, key=lambda each: each.node_rank))
    return record.model_copy(update={"evidence": stored, "evidence_summary": _build_summaries(others)})


def restore_evidence(record: AttemptRecord, job_name: str) -> tuple[Evidence, ...]:
    """Return the evidence of all nodes of a stopping attempt, ordered by node rank."""
    restored = [
        _restore_node(summary, rank, names.pod_name(job_name, record.attempt, rank) if summary.observed else "")
        for summary in record.evidence_summary
        for rank in parse_ranks(summary.ranks)
    ]
    return tuple(sorted((*record.evidence, *restored), key=lambda each: each.node_rank))


def count_nodes(record: AttemptRecord) -> int:
    """Return the number of nodes with evidence or in a summary; 0 before the attempt stops."""
    return len(record.evidence) + sum(len(parse_ranks(summary.ranks)) for summary in record.evidence_summary)


def measure_evidence_bytes(evidence: Iterable[Evidence]) -> int:
    """Return the size of the evidence as JSON in bytes."""
    return sum(len(each.model_dump_json(by_alias=True, exclude_defaults=True).encode()) + 1 for each in evidence)


def format_ranks(ranks: list[int]) -> str:
    """Format sorted node ranks as ranges: [0, 1, 2, 7] is `0-2,7`."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and ranges[-1][-1] == rank - 1:
            ranges[-1][1:] = [rank]
        else:
            ranges.append([rank])
    return ",".join("-".join(map(str, each)) for each in ranges)


def parse_ranks(text: str) -> list[int]:
    """Parse ranges of node ranks: `0-2,7` is [0, 1, 2, 7]. Raises ValueError."""
    bounds = [part.partition("-") for part in text.split(",")]
    return [rank for first, _, last in bounds for rank in range(int(first), int(last or first) + 1)]


def _build_summaries(evidence: Iterable[Evidence]) -> tuple[EvidenceSummary, ...]:
    ranks_by_summary: dict[EvidenceSummary, list[int]] = {}
    for each in evidence:
        ranks_by_summary.setdefault(_summarise_node(each), []).append(each.node_rank)
    return tuple(
        summary.model_copy(update={"ranks": format_ranks(sorted(ranks))}) for summary, ranks in ranks_by_summary.items()
    )


def _summarise_node(evidence: Evidence) -> EvidenceSummary:
    """Return the summary of one node, without its rank.

    Final evidence does not change any more, so that only its order matters: it must not precede stored evidence.
    """
    if is_final(evidence):
        outcome = Outcome.STOPPED if evidence.outcome == Outcome.STOPPED else Outcome.FAILED
        outcome = Outcome.SUCCEEDED if has_succeeded(evidence) else outcome
        is_victim = outcome is Outcome.FAILED and judge_node(evidence).victim
        return EvidenceSummary(ranks="", observed=True, ended=True, outcome=outcome.value, victim=is_victim)
    decides_verdict = evidence.disruption in DISRUPTION_MESSAGES or evicted_by_kueue(evidence) is not None
    is_never_created = not evidence.pod_name and not evidence.deleted
    return EvidenceSummary(
        ranks="",
        observed=bool(evidence.pod_name),
        ended=evidence.ended,
        deleted=evidence.deleted,
        reason=RELABELLED if evidence.reason == RELABELLED else "",
        disruption=evidence.disruption if decides_verdict else "",
        preemptor=evidence.preemptor if decides_verdict else "",
        outcome=evidence.outcome if is_never_created else "",
    )


def _restore_node(summary: EvidenceSummary, rank: int, pod_name: str) -> Evidence:
    fields = summary.model_dump(exclude={"ranks", "observed"})
    exit_code = 0 if summary.outcome == Outcome.SUCCEEDED else None
    return Evidence(node_rank=rank, pod_name=pod_name, exit_code=exit_code, **fields)
