"""Encoding of termination messages, limited to 4095 bytes so that the kubelet does not truncate them."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

from finetune_supervisor.contract import MAX_TERMINATION_BYTES
from finetune_supervisor.messages import TerminationMessage, to_json_object
from finetune_supervisor.safe_files import open_below


def encode_termination(termination: TerminationMessage) -> bytes:
    """Encode a termination message as JSON of fewer than MAX_TERMINATION_BYTES bytes.

    Longer messages lose the start of the stack first, then the end of the message.
    """
    encoded = _encode_json(termination)
    while len(encoded) >= MAX_TERMINATION_BYTES:
        excess_bytes = len(encoded) - MAX_TERMINATION_BYTES + 1
        if termination.stack:
            termination = replace(termination, stack=termination.stack[excess_bytes:])
        else:
            length = max(0, len(termination.message) - excess_bytes - 3)
            termination = replace(termination, message=termination.message[:length] + "...")
        encoded = _encode_json(termination)
    return encoded


def _encode_json(termination: TerminationMessage) -> bytes:
    return json.dumps(to_json_object(termination), ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def write_termination(path: Path, termination: TerminationMessage) -> None:
    """Write the message in place, because the kubelet bind-mounts the file, so that it cannot be replaced."""
    data = encode_termination(termination)
    descriptor = open_below(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, create_folder=False)
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        file.write(data)
