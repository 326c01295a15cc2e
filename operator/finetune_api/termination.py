"""Parses termination messages: JSON that the supervisor writes and the kubelet copies to the pod status."""

from enum import StrEnum

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from finetune_api.v1alpha1.base import MESSAGE_CONFIG
from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import Progress
from finetune_supervisor import contract
from finetune_supervisor.messages import TerminationMessage

# Errors of the trainer that a restart cannot fix: the spec, the rows or the storage must change.
USER_ERRORS = frozenset(Reason(name) for name in contract.USER_ERRORS)


class Outcome(StrEnum):
    """Outcome of a node; STARTING and RUNNING are final only if the supervisor was killed."""

    STARTING = contract.STARTING
    RUNNING = contract.RUNNING
    SUCCEEDED = contract.SUCCEEDED
    STOPPED = contract.STOPPED
    FAILED = contract.FAILED


@dataclass(config=MESSAGE_CONFIG, frozen=True)
class Termination(TerminationMessage):
    """Parsed termination message of one node."""

    outcome: Outcome = Outcome.STARTING
    progress: Progress | None = None


_PARSER = TypeAdapter(Termination)


def parse_termination(text: str | None) -> Termination | None:
    """Parse a termination message; return None for any other text, such as a log tail."""
    if not text or not text.lstrip().startswith("{"):
        return None
    try:
        return _PARSER.validate_json(text)
    except ValidationError:
        return None
