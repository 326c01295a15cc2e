"""What a dying node says: the JSON that the supervisor leaves in the termination log and the operator reads there."""

from enum import StrEnum

from pydantic import ValidationError

from finetune_api.v1alpha1.base import StatusModel
from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import Progress

MAX_BYTES = 4096  # the kubelet keeps the last 4096 bytes, so a longer message loses its head

# Errors that the trainer names: the spec, the rows or the storage must change before a restart can do better.
USER_ERRORS = frozenset(
    {
        Reason.CHAT_TEMPLATE_ERROR,
        Reason.CHECKPOINT_CORRUPT,
        Reason.DATASET_ERROR,
        Reason.INVALID_SPEC,
        Reason.MIXED_HARDWARE,
        Reason.MODEL_ERROR,
        Reason.MODEL_NOT_FOUND,
        Reason.NON_FINITE_LOSS,
        Reason.OUTPUT_ERROR,
        Reason.WORLD_SIZE_MISMATCH,
    }
)


class Outcome(StrEnum):
    """How far the node came; anything but the last three means that the supervisor itself was killed."""

    STARTING = "starting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    STOPPED = "stopped"
    FAILED = "failed"


class Termination(StatusModel):
    """One node's last words. `final` is false in what is written now and then while it still runs."""

    version: int = 1
    final: bool = False
    outcome: Outcome = Outcome.STARTING
    node_rank: int = 0
    attempt: int = 0
    phase: str = ""  # init, load, train, eval, save, publish, done: what the ranks did
    rank: int | None = None  # the first rank of this node that failed
    local_rank: int | None = None
    error_type: str = ""  # class name of the exception, or RankKilled, DnsTimeout, StartTimeout
    message: str = ""
    stack: str = ""  # tail of the traceback
    victim: bool = False  # the rank only suffered from the death of another
    exit_code: int | None = None  # of the rank
    signal: int | None = None  # that ended the rank
    time: float | None = None  # seconds since the epoch, sub-second, of the failure
    first_step: int | None = None  # step this attempt resumed from
    progress: Progress | None = None
    peak_memory_bytes: int | None = None  # largest rank of this node


def parse_termination(text: str | None) -> Termination | None:
    """The message, or None if the text is not one (a log tail, or nothing)."""
    if not text or not text.lstrip().startswith("{"):
        return None
    try:
        return Termination.model_validate_json(text)
    except ValidationError:
        return None
