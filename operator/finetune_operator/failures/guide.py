"""Generator of docs/reference/failures.md: what each reason means, which action follows and what a user can do."""

from collections.abc import Iterator

from finetune_api.v1alpha1.job import RestartPolicy
from finetune_api.v1alpha1.reasons import FailureAction, Reason
from finetune_api.v1alpha1.status import Fault
from finetune_operator.failures.error_patterns import PATTERNS
from finetune_operator.failures.node_avoidance import BROKEN, SUSPICIOUS

_LIMITS = RestartPolicy()
_INTRO = f"""# Failures

For each reason of a Failed condition, an event or `status.attempts[]`: what it means, what the operator does and what
you can do. [Failure handling](../operations/failure-handling.md) describes how the root cause and hangs are found.

A restart restarts all ranks from the last checkpoint. The first is immediate, later ones wait
`restartPolicy.backoffSeconds` ({_LIMITS.backoff_seconds}), doubled each time up to `maxBackoffSeconds`
({_LIMITS.max_backoff_seconds}), with jitter. Limits count restarts without progress: once a job passes its furthest
step, its budget is full again.
"""
_SECTIONS = {
    Fault.USER: ("The job must change", "The job fails at once: a restart would end in the same way."),
    Fault.RESOURCE: (
        "A resource ran out",
        "The same attempt would run out again. For a reason marked *Changed*, the next attempt runs with a change,"
        " recorded in `status.repair` ([memory](../user-guide/memory.md#when-memory-runs-out-anyway)). When no change"
        " is left, or `maxRestarts` is 0, the job fails and its message names the field to raise.",
    ),
    Fault.TRANSIENT: (
        "Transient failures",
        f"Restarted, at most `restartPolicy.maxRestarts` ({_LIMITS.max_restarts}) times without progress.",
    ),
    Fault.UNKNOWN: (
        "Unknown",
        f"Restarted, at most `maxRestarts` ({_LIMITS.max_restarts}) times without progress; the same reason at the same"
        " rank and step a second time ends the job.",
    ),
    Fault.INFRASTRUCTURE: (
        "Infrastructure",
        f"Restarted, at most `maxInfrastructureRestarts` ({_LIMITS.max_infrastructure_restarts}) times without"
        " progress.",
    ),
    Fault.PREEMPTION: (
        "Preemption",
        "Ranks save a checkpoint within the grace period; restarted as soon as the pods can be scheduled, with the"
        " limit of the section above.",
    ),
}


def render_failure_guide() -> str:
    """Return the page as Markdown, with one section per fault."""
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
            yield f"| `{reason}` | {_describe(reason)} | {reason.advice} |"


def _describe(reason: Reason) -> str:
    parts = [reason.meaning]
    if reason.action is FailureAction.REPAIR:
        parts.append("*Changed.*")
    if reason in BROKEN:
        parts.append("Later attempts avoid that Kubernetes node.")
    if reason in SUSPICIOUS:
        parts.append("Twice in a day on one Kubernetes node: later attempts avoid it.")
    if any(pattern.reason is reason for pattern in PATTERNS):
        parts.append("Also recognised in error text.")
    return " ".join(parts)
