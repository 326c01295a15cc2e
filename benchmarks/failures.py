"""How often the words of a failure are read right: precision and recall per reason, on known and on held-out texts."""

from collections import Counter

from benchmarks import container_starts as starts
from finetune_api.v1alpha1.reasons import FailureAction, Reason
from finetune_api.v1alpha1.status import Evidence, Fault
from finetune_operator.failures.rules import judge_node
from finetune_operator.failures.verdict import Verdict
from finetune_supervisor.failures.rank_failures import is_victim
from testing.corpus.error_corpus import Labelled, read_corpus, read_starts

_NOT_THE_USERS = (Fault.INFRASTRUCTURE, Fault.TRANSIENT)


def judged(entry: Labelled) -> Verdict:
    """As if a rank had raised it."""
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


def report(title: str, corpus: list[Labelled]) -> None:
    verdicts = [(entry, judged(entry)) for entry in corpus]
    wanted = Counter(entry.reason for entry, _ in verdicts)
    given = Counter(verdict.reason for _, verdict in verdicts)
    right = Counter(entry.reason for entry, verdict in verdicts if verdict.reason is entry.reason)
    print(f"\n{title}: {right.total()} of {len(corpus)} right\n{'reason':<24}{'texts':>6}{'found':>7}{'right':>7}")
    for reason in sorted(wanted | given, key=str):
        print(f"{reason:<24}{wanted[reason]:>6}{given[reason]:>7}{right[reason]:>7}")
    retried = [entry for entry, verdict in verdicts if is_retried_wrongly(entry.reason, verdict)]
    failed = [entry for entry, verdict in verdicts if is_failed_wrongly(entry.reason, verdict)]
    print(f"user's errors that are retried: {len(retried)}; faults of machines and networks that fail: {len(failed)}")
    for entry in (*retried, *failed):
        print(f"  {entry.reason} <- {judged(entry).reason}: {entry.text[:160]!r}")


def is_retried_wrongly(reason: Reason, verdict: Verdict) -> bool:
    return reason.fault is Fault.USER and verdict.action is FailureAction.RESTART


def is_failed_wrongly(reason: Reason, verdict: Verdict) -> bool:
    return reason.fault in _NOT_THE_USERS and verdict.action is FailureAction.FAIL


if __name__ == "__main__":
    report("texts the patterns were written for", read_corpus(held_out=False))
    report("texts held out", read_corpus(held_out=True))
    starts.report("containers that never ran, texts the rules were written for", read_starts(held_out=False))
    starts.report("containers that never ran, texts held out", read_starts(held_out=True))
