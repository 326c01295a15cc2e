"""The termination message: what a node leaves behind, under 4096 bytes, so that the kubelet keeps all of it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from finetune_supervisor.contract import STARTING, to_camel

MAX_BYTES = 4095  # the kubelet keeps the last 4096 bytes of the file; one byte more and the JSON loses its head


@dataclass(frozen=True)
class Termination:
    """The fields of finetune_api.termination.Termination, which a test holds this against."""

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


def encode(termination: Termination) -> bytes:
    """As JSON that fits. What must go is taken from the head of the stack first, then from the end of the message."""
    encoded = _encode(termination)
    while len(encoded) > MAX_BYTES:
        excess = len(encoded) - MAX_BYTES
        if termination.stack:
            termination = replace(termination, stack=termination.stack[excess:])
        else:
            kept = max(0, len(termination.message) - excess - 3)
            termination = replace(termination, message=termination.message[:kept] + "...")
        encoded = _encode(termination)
    return encoded


def _encode(termination: Termination) -> bytes:
    values = {to_camel(name): value for name, value in asdict(termination).items()}
    present = {name: value for name, value in values.items() if value not in (None, "")}
    return json.dumps(present, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def write_termination(path: Path, termination: Termination) -> None:
    """In one write, in place: the file is a mount of the kubelet's and cannot be renamed over."""
    data = encode(termination)
    with path.open("wb", buffering=0) as file:
        file.write(data)
