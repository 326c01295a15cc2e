"""Defines Verdict, the judgement on a failed node or attempt.

failures.rules, failures.kubelet_rejections and failures.container_start_rules return verdicts; with_verdict
stores a verdict in the record of an attempt.
"""

from dataclasses import dataclass

from finetune_api.v1alpha1.reasons import FailureAction, Reason
from finetune_api.v1alpha1.status import AttemptRecord, Evidence, Fault
from finetune_supervisor.error_text import MAX_LINE_CHARACTERS, select_line


@dataclass(frozen=True)
class Verdict:
    """Judgement on a failed node or attempt, with the reason and the resulting action."""

    reason: Reason
    message: str
    victim: bool = False
    evidence: Evidence | None = None
    no_repair_left: bool = False
    preemptor: str = ""  # workload in favour of which the node was preempted, if it is known

    @property
    def action(self) -> FailureAction:
        """Action that follows from the reason; the job fails instead of being repaired if no repair is left."""
        return FailureAction.FAIL if self.no_repair_left else self.reason.action

    @property
    def fault(self) -> Fault:
        """Fault category of the reason."""
        assert self.reason.fault is not None  # every reason of a verdict has a fault
        return self.reason.fault


def with_verdict(record: AttemptRecord, verdict: Verdict) -> AttemptRecord:
    """Return the record with reason, fault, message, node and rank of the verdict."""
    cause = verdict.evidence
    update = {
        "reason": verdict.reason,
        "fault": verdict.fault,
        "message": verdict.message,
        "node_rank": cause.node_rank if cause else None,
        "rank": cause.rank if cause else None,
        "k8s_node": cause.k8s_node if cause else "",
    }
    return record.model_copy(update=update)


def describe_node(evidence: Evidence) -> str:
    """Describe the node for messages, for example as `node 1 (gpu-7) rank 5`."""
    node = f"node {evidence.node_rank}" + (f" ({evidence.k8s_node})" if evidence.k8s_node else "")
    return f"{node} rank {evidence.rank}" if evidence.rank is not None else node


def extract_last_line(text: str) -> str:
    """Return the last line of a text with words, truncated to 300 characters; for a traceback, the exception."""
    return select_line(text)[:MAX_LINE_CHARACTERS]
