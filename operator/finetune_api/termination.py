"""Parses termination messages: JSON that the supervisor writes and the kubelet copies to the pod status."""

import re
from enum import StrEnum

from pydantic import TypeAdapter, field_validator
from pydantic.dataclasses import dataclass

from finetune_api.untrusted_json import LATEST_TIME, parse_untrusted_json
from finetune_api.v1alpha1.base import MESSAGE_CONFIG
from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import Progress
from finetune_supervisor import contract
from finetune_supervisor.messages import TerminationMessage

# Trainer errors that a restart cannot fix: the user must change the spec, the dataset or the storage.
USER_ERRORS = frozenset(Reason(name) for name in contract.USER_ERRORS)


_CLASS_NAME = re.compile(r"[A-Za-z_][\w.]{0,99}", re.ASCII)  # class of an exception, with or without its module


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

    @field_validator("error_type", "category")
    @classmethod
    def _drop_invalid_error_type(cls, value: str) -> str:
        return value if _CLASS_NAME.fullmatch(value) else ""

    @field_validator("time")
    @classmethod
    def _drop_out_of_range_time(cls, value: float | None) -> float | None:
        return value if value is not None and 0 <= value < LATEST_TIME.timestamp() else None


_PARSER = TypeAdapter(Termination)


def parse_termination(text: str | None) -> Termination | None:
    """Parse a termination message; return None for any other text, such as a log tail."""
    if not text or not text.lstrip().startswith("{"):
        return None
    return parse_untrusted_json(_PARSER, text)
