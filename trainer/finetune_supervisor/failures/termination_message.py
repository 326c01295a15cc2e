"""The termination message of a node, below 4096 bytes so that the kubelet keeps all of it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from finetune_supervisor.contract import MAX_TERMINATION_BYTES, STARTING, to_camel


@dataclass(frozen=True)
class TerminationMessage:
    """The same fields as finetune_api.termination.Termination; a test compares them."""

    node_rank: int
    attempt: int
    version: int = 1
    final: bool = False
    outcome: str = STARTING
    phase: str = ""
    rank: int | None = None
    local_rank: int | None = None
    error_type: str = ""
    message: str = ""
    stack: str = ""
    exit_code: int | None = None
    signal: int | None = None
    victim: bool = False
    time: float | None = None
    first_step: int | None = None
    progress: dict[str, object] | None = None
    peak_memory_bytes: int | None = None


def encode_termination(termination: TerminationMessage) -> bytes:
    """Encode as JSON of fewer than MAX_TERMINATION_BYTES.

    What is too long is removed from the start of the stack first, then from the end of the message.
    """
    encoded = _encode(termination)
    while len(encoded) >= MAX_TERMINATION_BYTES:
        excess_bytes = len(encoded) - MAX_TERMINATION_BYTES + 1
        if termination.stack:
            termination = replace(termination, stack=termination.stack[excess_bytes:])
        else:
            length = max(0, len(termination.message) - excess_bytes - 3)
            termination = replace(termination, message=termination.message[:length] + "...")
        encoded = _encode(termination)
    return encoded


def _encode(termination: TerminationMessage) -> bytes:
    values = {to_camel(name): value for name, value in asdict(termination).items()}
    present = {name: value for name, value in values.items() if value not in (None, "")}
    return json.dumps(present, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def write_termination(path: Path, termination: TerminationMessage) -> None:
    """Write the message in place with one write: the file is a mount of the kubelet and cannot be replaced."""
    data = encode_termination(termination)
    with path.open("wb", buffering=0) as file:
        file.write(data)
