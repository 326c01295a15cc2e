"""Classifies error messages by failure reason with the patterns that the supervisor uses as well."""

from finetune_api.termination import Outcome
from finetune_api.v1alpha1.reasons import FailureAction, Reason
from finetune_api.v1alpha1.status import Evidence, Fault
from finetune_operator.failures.pattern_set import PatternSet
from finetune_operator.failures.verdict import Verdict, describe_node, extract_last_line
from finetune_supervisor import error_patterns

PATTERNS = {Reason(reason): expressions for reason, expressions in error_patterns.PATTERNS.items()}
_PATTERN_SET = PatternSet(
    [(reason, expression) for reason, expressions in PATTERNS.items() for expression in expressions],
    exceptions=error_patterns.EXCEPTIONS,
)


def classify_error_text(text: str) -> Reason | None:
    """Return the reason of the first pattern that matches the error text, or None (decisions/202)."""
    return _PATTERN_SET.find_first(text)


def matches_error_pattern(evidence: Evidence) -> Verdict | None:
    """Match an error whose message identifies the cause, regardless of the exception class."""
    if evidence.outcome == Outcome.STOPPED:
        return None
    by_category = next((reason for reason in PATTERNS if reason == evidence.category), None)
    reason = by_category or classify_error_text(f"{evidence.error_type}: {evidence.message}")
    if reason is None:
        return None
    needs_advice = reason.action is FailureAction.FAIL or reason.fault is Fault.INFRASTRUCTURE
    return Verdict(
        reason=reason,
        message=f"{describe_node(evidence)}: {extract_last_line(evidence.message)}"
        + (f"; {reason.advice}" if needs_advice else ""),
        victim=evidence.victim or reason in (Reason.PEER_LOST, Reason.RENDEZVOUS_TIMEOUT),
    )
