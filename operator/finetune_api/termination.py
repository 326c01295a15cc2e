"""The termination message of a node: JSON that the supervisor writes and the operator reads from the pod status."""

from enum import StrEnum

from pydantic import ValidationError

from finetune_api.v1alpha1.base import StatusModel
from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import Progress
from finetune_supervisor import contract

# Errors of the trainer that a restart cannot fix: the spec, the rows or the storage must change.
USER_ERRORS = frozenset(Reason(name) for name in contract.USER_ERRORS)


class Outcome(StrEnum):
    """How a node ended; the first two are final only if the supervisor itself was killed."""

    STARTING = contract.STARTING
    RUNNING = contract.RUNNING
    SUCCEEDED = contract.SUCCEEDED
    STOPPED = contract.STOPPED
    FAILED = contract.FAILED


class Termination(StatusModel):
    """The termination message of one node; `final` is false in versions written while it still runs."""

    version: int = 1
    final: bool = False
    outcome: Outcome = Outcome.STARTING
    node_rank: int = 0
    attempt: int = 0
    phase: str = ""  # init, load, train, eval, save, publish, done or stopped
    rank: int | None = None  # the first rank of this node that failed
    local_rank: int | None = None
    error_type: str = ""  # class name of the exception, or RankKilled, DnsTimeout, StartTimeout
    message: str = ""
    stack: str = ""  # tail of the traceback
    victim: bool = False  # the rank failed only because another one did
    exit_code: int | None = None  # of the rank
    signal: int | None = None  # that ended the rank
    time: float | None = None  # of the failure, in seconds since the epoch
    first_step: int | None = None  # step from which this attempt resumed
    progress: Progress | None = None
    peak_memory_bytes: int | None = None  # maximum over the ranks of this node


def parse_termination(text: str | None) -> Termination | None:
    """Parse a termination message; return None if the text is not one, such as a log tail or empty."""
    if not text or not text.lstrip().startswith("{"):
        return None
    try:
        return Termination.model_validate_json(text)
    except ValidationError:
        return None
