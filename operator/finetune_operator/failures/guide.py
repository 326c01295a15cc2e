"""Generates docs/reference/failures.md, which explains every failure reason to users."""

from collections.abc import Iterator

from finetune_api.v1alpha1.job import RestartPolicy
from finetune_api.v1alpha1.reasons import FailureAction, Reason
from finetune_api.v1alpha1.status import Fault
from finetune_operator.failures.error_patterns import PATTERNS
from finetune_operator.failures.node_avoidance import BROKEN_NODE_REASONS, SUSPICIOUS_REASONS

_LIMITS = RestartPolicy()
_INTRO = f"""# Failures

This page lists every reason of a Failed condition, an event or `status.attempts[]`, the action of the operator and what
you can do. [Failure handling](../operations/failure-handling.md) describes how the root cause and hangs are found.

A restart starts all ranks again from the last checkpoint. The first restart is immediate. Later restarts wait
`restartPolicy.backoffSeconds` ({_LIMITS.backoff_seconds}), doubled each time up to `maxBackoffSeconds`
({_LIMITS.max_backoff_seconds}), with jitter. The limits count restarts without progress: once the termination
message of an attempt contains a higher step than all earlier ones, the restart budget is reset.
"""
_SECTIONS = {
    Fault.USER: ("The job must change", "The job fails at once, because a restart would fail again."),
    Fault.RESOURCE: (
        "A resource ran out",
        "An unchanged attempt would fail again. For a reason marked *Changed*, the next attempt runs with a change that"
        " is recorded in `status.repair` ([memory](../user-guide/memory.md#when-memory-runs-out-anyway)). If no change"
        " is left, or `maxRestarts` is 0, the job fails and its message names the field to raise.",
    ),
    Fault.TRANSIENT: (
        "Transient failures",
        f"The job is restarted at most `restartPolicy.maxRestarts` ({_LIMITS.max_restarts}) times without progress.",
    ),
    Fault.UNKNOWN: (
        "Unknown",
        f"The job is restarted at most `maxRestarts` ({_LIMITS.max_restarts}) times without progress. It fails if the"
        " same reason occurs a second time at the same rank and step.",
    ),
    Fault.INFRASTRUCTURE: (
        "Infrastructure",
        f"The job is restarted at most `maxInfrastructureRestarts` ({_LIMITS.max_infrastructure_restarts}) times"
        " without progress.",
    ),
    Fault.PREEMPTION: (
        "Preemption",
        "The ranks save a checkpoint within the grace period. The job is restarted as soon as its pods can be"
        " scheduled, with the same limit as for infrastructure faults. A preemption by Kueue whose preemptor is known"
        " has no limit ([preemption](../operations/failure-handling.md#preemption)).",
    ),
}


def render_failure_guide() -> str:
    """Render the page as Markdown, with one section per fault."""
    return _INTRO + "".join("\n" + "\n".join(_render_section(fault)) + "\n" for fault in _SECTIONS)


def _render_section(fault: Fault) -> Iterator[str]:
    title, action = _SECTIONS[fault]
    yield f"## {title} (fault: {fault})"
    yield ""
    yield action
    yield ""
    yield "| reason | what it means | what you can do |"
    yield "| --- | --- | --- |"
    for reason in Reason:
        if reason.fault is fault:
            yield f"| `{reason}` | {_describe_reason(reason)} | {reason.advice} |"


def _describe_reason(reason: Reason) -> str:
    sentences = [reason.meaning]
    if reason.action is FailureAction.REPAIR:
        sentences.append("*Changed.*")
    if reason in BROKEN_NODE_REASONS:
        sentences.append("Later attempts avoid that Kubernetes node.")
    if reason in SUSPICIOUS_REASONS:
        sentences.append("After two failures in a day on one Kubernetes node, later attempts avoid it.")
    if reason in PATTERNS:
        sentences.append("Also recognised in error text.")
    return " ".join(sentences)
