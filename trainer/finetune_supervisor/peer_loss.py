"""The one list of errors that a rank or node raises when it loses a peer, so that the failure of the peer is the cause.

The supervisor recognises the victims among its ranks by it, the operator those among the nodes (decisions/214).
"""

from __future__ import annotations

import re

# Exceptions of torch.distributed, of Python's sockets in programs that connect to their peers themselves, and of a
# launcher that was terminated.
PEER_LOSS_TYPES = frozenset(
    {"DistBackendError", "DistNetworkError", "DistStoreError", "SignalException", "TimeoutError", "ConnectionError"}
    | {error.__name__ for error in ConnectionError.__subclasses__()}
)
# Case-insensitive regular expressions. Each must be unambiguous by itself, because the supervisor applies no
# other patterns first, and have bounded repetitions, because texts are long.
PEER_LOSS_TEXTS = (
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
    """Return whether a rank raises this error when it loses a peer."""
    return error_type in PEER_LOSS_TYPES or re.search("|".join(PEER_LOSS_TEXTS), message, re.IGNORECASE) is not None
