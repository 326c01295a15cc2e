"""How often the words of containers that never ran are read right."""

from collections import Counter

from finetune_api.v1alpha1.reasons import FailureAction, Reason
from finetune_api.v1alpha1.status import Evidence
from finetune_operator.core.pending import waiting_for
from finetune_operator.failures.rules import judge_node
from testing.builders.jobs import NOW, job, pod, seen
from testing.corpus.error_corpus import Start

REGISTRY = "RegistryInTrouble"
USERS = (Reason.START_ERROR, Reason.INVALID_SPEC, Reason.IMAGE_PULL_FAILED)


def told(entry: Start) -> tuple[str, FailureAction]:
    """The label that the operator would give, and what it does in the end; what is waited for is tried again."""
    if entry.kind in ("StartError", "Rejected"):
        reason, message = entry.text.split(": ", 1) if entry.kind == "Rejected" else (entry.kind, entry.text)
        exit_code = 128 if entry.kind == "StartError" else None
        verdict = judge_node(Evidence(node_rank=0, ended=True, reason=reason, exit_code=exit_code, message=message))
        return verdict.reason, verdict.action
    of = job()
    state = {"waiting": {"reason": entry.kind, "message": entry.text}}
    observation = seen(of, pod(of, 0, containerStatuses=[{"name": "trainer", "state": state}]))
    wait = waiting_for(of, observation, observation.of_attempt(0), NOW)
    assert wait is not None
    if wait.verdict is not None:
        return wait.verdict.reason, wait.verdict.action
    if wait.reason == Reason.IMAGE_PULL_FAILED:
        return (wait.reason, FailureAction.FAIL) if wait.image else (REGISTRY, FailureAction.RESTART)
    return wait.reason, FailureAction.RESTART


def is_wrong(entry: Start) -> str:
    """What would be done wrongly, if anything."""
    action = told(entry)[1]
    if entry.label in USERS:
        return "retried" if action is FailureAction.RESTART else ""
    return "failed" if action is FailureAction.FAIL else ""


def report(title: str, corpus: list[Start]) -> None:
    """A line per label: how many texts there are, how many were given it, how many of them rightly."""
    given = [(entry, told(entry)[0]) for entry in corpus]
    wanted, found = Counter(entry.label for entry in corpus), Counter(label for _, label in given)
    right = Counter(label for entry, label in given if label == entry.label)
    print(f"\n{title}: {right.total()} of {len(corpus)} right\n{'label':<24}{'texts':>6}{'found':>7}{'right':>7}")
    for label in sorted(wanted | found, key=str):
        print(f"{label:<24}{wanted[label]:>6}{found[label]:>7}{right[label]:>7}")
    wrong = [(entry, how) for entry in corpus if (how := is_wrong(entry))]
    counts = Counter(how for _, how in wrong)
    print(f"user's errors that are retried: {counts['retried']}; others that fail: {counts['failed']}")
    for entry, how in wrong:
        print(f"  {entry.label}, {how}: {entry.text[:160]!r}")
