"""Patterns of the errors that a rank raises when it loses its connection to a peer.

The supervisor uses them to find victims among its ranks, the operator to find victims among the nodes (decisions/214).
"""

from __future__ import annotations

import re

# Exceptions of torch.distributed, of Python sockets for programs that do not use torch.distributed, and of terminated
# launchers.
PEER_LOSS_TYPES = frozenset(
    {"DistBackendError", "DistNetworkError", "DistStoreError", "SignalException", "TimeoutError", "ConnectionError"}
    | {error.__name__ for error in ConnectionError.__subclasses__()}
)
# Case-insensitive regular expressions. Each must be unambiguous, because the supervisor applies no other patterns
# before them, and have only bounded repetitions, because error messages can be long.
PEER_LOSS_PATTERNS = (
    r"connection (closed|reset) by (remote )?peer",
    r"connection refused",
    r"broken pipe",
    r"read error \[",  # gloo, followed by the address of the peer
    r"gloo[^\n]{0,200}timed? ?out",
    r"socket ?timeout",
    r"NCCL (error|timeout)",
    r"collective operation timeout",
    r"detected by watchdog",
    r"heartbeat monitor timed out|no heartbeat of its watchdog|watchdog got stuck",
    r"communicator was aborted",
    r"remote process exit",
    r"ncclRemoteError",
    r"timed out waiting|timeout waiting for key",
    r"get exception dump flag from the global store",
    r"asynchronous nature of CUDA kernels|taking the entire process down",
    r"connection was likely closed|remote server shutdown|caused pair closure",
    r"(recvValue|sendBytes|recvBytes) failed|failed to recv, got 0 bytes",
)


def is_victim(error_type: str, message: str) -> bool:
    """Return whether an error is typical of a rank that lost a peer."""
    return error_type in PEER_LOSS_TYPES or re.search("|".join(PEER_LOSS_PATTERNS), message, re.IGNORECASE) is not None
