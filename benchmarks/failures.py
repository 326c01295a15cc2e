"""Measures the classification accuracy for failure messages: precision and recall by reason."""

from collections import Counter

from benchmarks import container_starts
from finetune_api.v1alpha1.reasons import FailureAction, Reason
from finetune_api.v1alpha1.status import Evidence, Fault
from finetune_operator.failures.rules import judge_node
from finetune_operator.failures.verdict import Verdict
from finetune_supervisor.peer_loss import is_victim
from testing.corpus.error_corpus import LabelledError, read_corpus, read_start_failures

_NOT_FAULT_OF_USER = (Fault.INFRASTRUCTURE, Fault.TRANSIENT)


def judge_entry(entry: LabelledError) -> Verdict:
    """Return the verdict on the error of a corpus entry, as if a rank had raised it."""
    error_type = entry.error_type.rpartition(".")[2] or "RuntimeError"
    return judge_node(
        Evidence(
            node_rank=0,
            ended=True,
            exit_code=1,
            outcome="failed",
            error_type=error_type,
            message=entry.text,
            victim=is_victim(error_type, entry.text),
        )
    )


def print_report(title: str, corpus: list[LabelledError]) -> None:
    verdicts = [(entry, judge_entry(entry)) for entry in corpus]
    expected_counts = Counter(entry.reason for entry, _ in verdicts)
    assigned_counts = Counter(verdict.reason for _, verdict in verdicts)
    correct_counts = Counter(entry.reason for entry, verdict in verdicts if verdict.reason is entry.reason)
    print(f"\n{title}: {correct_counts.total()} of {len(corpus)} correct")
    print(f"{'reason':<24}{'texts':>6}{'found':>7}{'correct':>9}")
    for reason in sorted(expected_counts | assigned_counts, key=str):
        print(f"{reason:<24}{expected_counts[reason]:>6}{assigned_counts[reason]:>7}{correct_counts[reason]:>9}")
    retried_entries = [entry for entry, verdict in verdicts if is_wrongly_retried(entry.reason, verdict)]
    failed_entries = [entry for entry, verdict in verdicts if is_wrongly_failed(entry.reason, verdict)]
    print(
        f"user errors that are retried: {len(retried_entries)};"
        f" infrastructure faults that fail the job: {len(failed_entries)}"
    )
    for entry in (*retried_entries, *failed_entries):
        print(f"  {entry.reason} <- {judge_entry(entry).reason}: {entry.text[:160]!r}")


def is_wrongly_retried(reason: Reason, verdict: Verdict) -> bool:
    return reason.fault is Fault.USER and verdict.action is FailureAction.RESTART


def is_wrongly_failed(reason: Reason, verdict: Verdict) -> bool:
    return reason.fault in _NOT_FAULT_OF_USER and verdict.action is FailureAction.FAIL


if __name__ == "__main__":
    print_report("texts the patterns were written for", read_corpus(held_out=False))
    print_report("texts held out", read_corpus(held_out=True))
    container_starts.print_report(
        "containers that never ran, texts the rules were written for", read_start_failures(held_out=False)
    )
    container_starts.print_report("containers that never ran, texts held out", read_start_failures(held_out=True))
