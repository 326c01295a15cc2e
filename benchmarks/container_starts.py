"""Measures the classification accuracy for messages of containers that never started."""

from collections import Counter

from finetune_api.v1alpha1.reasons import FailureAction, Reason
from finetune_api.v1alpha1.status import Evidence
from finetune_operator.core.pending_reasons import find_pending_reason
from finetune_operator.failures.rules import judge_node
from testing.builders.jobs import NOW, build_observation, job, pod
from testing.corpus.error_corpus import LabelledStartFailure

REGISTRY_OUTAGE = "RegistryInTrouble"
USER_REASONS = (Reason.START_ERROR, Reason.INVALID_SPEC, Reason.IMAGE_PULL_FAILED)


def classify_entry(entry: LabelledStartFailure) -> tuple[str, FailureAction]:
    """Return the label that the operator assigns and its action; a pending reason without a verdict is retried."""
    if entry.kind in ("StartError", "Rejected"):
        reason, message = entry.text.split(": ", 1) if entry.kind == "Rejected" else (entry.kind, entry.text)
        exit_code = 128 if entry.kind == "StartError" else None
        verdict = judge_node(Evidence(node_rank=0, ended=True, reason=reason, exit_code=exit_code, message=message))
        return verdict.reason, verdict.action
    job_object = job()
    state = {"waiting": {"reason": entry.kind, "message": entry.text}}
    observation = build_observation(
        job_object, pod(job_object, 0, containerStatuses=[{"name": "trainer", "state": state}])
    )
    pending = find_pending_reason(job_object, observation, observation.nodes_of_attempt(0), NOW)
    assert pending is not None
    if pending.verdict is not None:
        return pending.verdict.reason, pending.verdict.action
    if pending.reason == Reason.IMAGE_PULL_FAILED:
        return (
            (pending.reason, FailureAction.FAIL)
            if pending.is_image_pull_error
            else (REGISTRY_OUTAGE, FailureAction.RESTART)
        )
    return pending.reason, FailureAction.RESTART


def find_wrong_action(entry: LabelledStartFailure) -> str:
    """Return the wrong action, "retried" or "failed", or an empty string if the operator's action is right."""
    action = classify_entry(entry)[1]
    if entry.label in USER_REASONS:
        return "retried" if action is FailureAction.RESTART else ""
    return "failed" if action is FailureAction.FAIL else ""


def print_report(title: str, corpus: list[LabelledStartFailure]) -> None:
    """Print the number of messages, assignments and correct assignments for each label."""
    assigned_labels = [(entry, classify_entry(entry)[0]) for entry in corpus]
    expected_counts = Counter(entry.label for entry in corpus)
    assigned_counts = Counter(label for _, label in assigned_labels)
    correct_counts = Counter(label for entry, label in assigned_labels if label == entry.label)
    print(f"\n{title}: {correct_counts.total()} of {len(corpus)} correct")
    print(f"{'label':<24}{'texts':>6}{'found':>7}{'correct':>9}")
    for label in sorted(expected_counts | assigned_counts, key=str):
        print(f"{label:<24}{expected_counts[label]:>6}{assigned_counts[label]:>7}{correct_counts[label]:>9}")
    errors = [(entry, error) for entry in corpus if (error := find_wrong_action(entry))]
    error_counts = Counter(error for _, error in errors)
    print(f"user errors that are retried: {error_counts['retried']}; others that fail: {error_counts['failed']}")
    for entry, error in errors:
        print(f"  {entry.label}, {error}: {entry.text[:160]!r}")
