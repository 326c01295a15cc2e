"""Reads from NCCL's log which network it uses, because it falls back to TCP sockets without an error."""

import os
import re
from collections.abc import MutableMapping
from pathlib import Path

_FILE = "nccl.log"
_NETWORK = re.compile(r"NCCL INFO (?:Using network|Initialized NET plugin|Assigned NET plugin) (\S+)")
_MAX_BYTES = 1 << 20
SOCKETS = "Socket"


def enable_nccl_log(folder: Path, local_rank: int, environment: MutableMapping[str, str] = os.environ) -> Path | None:
    """Let NCCL log its initialization to a file, and return its path; None if the user set NCCL's logging.

    Call it before the process group is initialised.
    """
    if any(name in environment for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS")):
        return None
    path = folder / f"{local_rank}-{_FILE}"
    environment.update({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": str(path)})
    return path


def read_network(log: Path | None) -> str:
    """Return the network that NCCL uses, such as Socket or IB; empty if it is unknown or no network is used."""
    if log is None:
        return ""
    try:
        with log.open("rb") as file:
            text = file.read(_MAX_BYTES).decode(errors="replace")
    except OSError:  # not written, because NCCL is not used
        return ""
    networks = _NETWORK.findall(text)
    return str(networks[-1]) if networks else ""
