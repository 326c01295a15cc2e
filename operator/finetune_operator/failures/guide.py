"""The page on failures, made from the reasons, the rules and the limits: what each means, what follows, what to do."""

from collections.abc import Iterator

from finetune_api.v1alpha1.job import RestartPolicy
from finetune_api.v1alpha1.reasons import FailureAction, Reason
from finetune_api.v1alpha1.status import Fault
from finetune_operator.failures.error_patterns import PATTERNS
from finetune_operator.failures.node_avoidance import BROKEN, SUSPICIOUS

_LIMITS = RestartPolicy()
_INTRO = f"""# Failures

For each reason that a Failed condition, an event or `status.attempts[]` may give: what it means, what the operator does
and what you can do. [docs/errors.md](../errors.md) tells how one node is found to be the cause, and how hangs are
noticed.

Every restart is one of all ranks, from the last checkpoint. The first is immediate, later ones wait
`restartPolicy.backoffSeconds` ({_LIMITS.backoff_seconds}), doubled each time up to `maxBackoffSeconds`
({_LIMITS.max_backoff_seconds}), with jitter. Limits are kept against restarts without progress: a job that got further
than ever before has its full budget again.
"""
_SECTIONS = {
    Fault.USER: ("The job must change", "The job fails at once: a restart would end in the same way."),
    Fault.RESOURCE: (
        "Something ran out",
        "A plain restart would run out again. Where it says *changed*, the next attempt runs with something"
        " changed, which is in `status.repair`"
        " ([docs/user-guide/memory.md](../user-guide/memory.md#when-memory-runs-out-anyway)); when nothing"
        " is left to change, or `maxRestarts` is 0, the job fails with what there was and what to raise.",
    ),
    Fault.TRANSIENT: (
        "Accidents",
        f"Restarted, at most `restartPolicy.maxRestarts` ({_LIMITS.max_restarts}) times without progress.",
    ),
    Fault.UNKNOWN: (
        "Nobody knows yet",
        f"Restarted, at most `maxRestarts` ({_LIMITS.max_restarts}) times without progress; the same reason at the same"
        " rank and step again ends the job.",
    ),
    Fault.INFRASTRUCTURE: (
        "Machines and their owners",
        f"Restarted, at most `maxInfrastructureRestarts` ({_LIMITS.max_infrastructure_restarts}) times without"
        " progress.",
    ),
    Fault.PREEMPTION: (
        "Somebody else needs the machines",
        "Ranks save a checkpoint within the grace period; restarted as soon as there is room, with the limit of the"
        " section above.",
    ),
}


def render_failure_guide() -> str:
    """Markdown, one section per fault."""
    return _INTRO + "".join("\n" + "\n".join(_section(fault)) + "\n" for fault in _SECTIONS)


def _section(fault: Fault) -> Iterator[str]:
    title, follows = _SECTIONS[fault]
    yield f"## {title} (fault: {fault})"
    yield ""
    yield follows
    yield ""
    yield "| reason | what it means | what you can do |"
    yield "| --- | --- | --- |"
    for reason in Reason:
        if reason.fault is fault:
            yield f"| `{reason}` | {_meaning(reason)} | {reason.advice} |"


def _meaning(reason: Reason) -> str:
    parts = [reason.meaning]
    if reason.action is FailureAction.REPAIR:
        parts.append("*Changed.*")
    if reason in BROKEN:
        parts.append("Later attempts avoid that Kubernetes node.")
    if reason in SUSPICIOUS:
        parts.append("Twice in a day on one Kubernetes node: later attempts avoid it.")
    if any(pattern.reason is reason for pattern in PATTERNS):
        parts.append("Also told by the words of an error.")
    return " ".join(parts)
