"""What is said of a failed node: the reason, what follows, and the words for it."""

from dataclasses import dataclass

from finetune_api.v1alpha1.reasons import FailureAction, Reason
from finetune_api.v1alpha1.status import Evidence, Fault


@dataclass(frozen=True)
class Verdict:
    """Why an attempt ended, whose fault it was and what to do."""

    reason: Reason
    message: str
    victim: bool = False
    evidence: Evidence | None = None
    helpless: bool = False  # nothing is left that could be changed

    @property
    def action(self) -> FailureAction:
        return FailureAction.FAIL if self.helpless else self.reason.action

    @property
    def fault(self) -> Fault:
        assert self.reason.fault is not None  # a verdict blames somebody
        return self.reason.fault


def where(evidence: Evidence) -> str:
    """`node 1 (gpu-7)`, or `node 1 (gpu-7) rank 5`."""
    node = f"node {evidence.node_rank}" + (f" ({evidence.k8s_node})" if evidence.k8s_node else "")
    return f"{node} rank {evidence.rank}" if evidence.rank is not None else node


def first_line(text: str) -> str:
    """The line of an error that says most: the last one that is not empty."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
