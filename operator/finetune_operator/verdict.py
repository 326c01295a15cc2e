"""What is said of a failed node: the reason, what follows, and the words for it."""

from dataclasses import dataclass
from enum import StrEnum

from finetune_api.reasons import Reason
from finetune_api.status import Evidence, Fault


class FailureAction(StrEnum):
    """What follows from a verdict, as long as the restart budget lasts."""

    RESTART = "Restart"
    REPAIR = "Repair"  # and restart
    FAIL = "Fail"


@dataclass(frozen=True)
class Verdict:
    """Why an attempt ended, whose fault it was and what to do."""

    reason: Reason
    action: FailureAction
    message: str
    victim: bool = False
    evidence: Evidence | None = None

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
