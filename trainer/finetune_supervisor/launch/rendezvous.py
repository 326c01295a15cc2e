"""Rendezvous of the nodes of an attempt: a TCPStore in the launcher of node rank 0.

The process groups of the ranks use the same store. It stays open until all nodes have left.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from finetune_supervisor.contract import Node

# The operator ends nodes that wait for others earlier, see spec.startupDeadlineSeconds.
JOIN_TIMEOUT_SECONDS = 1800.0
LEAVE_TIMEOUT_SECONDS = 60.0
_JOINED, _LEFT = "came", "left"  # key prefixes in the store


class RendezvousConnectionError(Exception):
    """The launcher of node rank 0 cannot be reached."""


class RendezvousTimeoutError(Exception):
    """Other nodes did not join in time."""


class Rendezvous:
    """The rendezvous of one attempt. Keys contain the attempt, so that nodes of another attempt never complete it."""

    def __init__(self, node: Node, *, timeout_seconds: float = JOIN_TIMEOUT_SECONDS) -> None:
        """Open the store on node rank 0, or connect to it.

        Raises: RendezvousConnectionError on the other nodes; RuntimeError of torch if the port is in use.
        """
        dist: Any = importlib.import_module("torch.distributed")  # not at import: images without torch import this file
        self._node = node
        self._timeout_seconds = timeout_seconds
        is_master, timeout = node.node_rank == 0, timedelta(seconds=timeout_seconds)
        try:
            store = dist.TCPStore(node.master_addr, node.master_port, None, is_master, timeout, wait_for_workers=False)
        except RuntimeError as error:
            if is_master:
                raise
            raise RendezvousConnectionError(
                f"{node.master_addr}:{node.master_port}, the address of node rank 0, could not be reached within"
                f" {timeout_seconds:.0f}s; check network policies and spec.network.interface ({error})"
            ) from error
        self._store: Any = dist.PrefixStore(f"finetune/{node.uid}/{node.attempt}", store)

    def wait_for_all(self) -> None:
        """Join and wait for all other nodes. Raises RendezvousTimeoutError, which names the missing ones."""
        self._store.set(f"{_JOINED}/{self._node.node_rank}", "")
        keys = self._keys(_JOINED)
        try:
            self._store.wait(keys, timedelta(seconds=self._timeout_seconds))  # one wait: torch logs each timeout
        except RuntimeError as error:
            missing = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
            if missing:
                raise RendezvousTimeoutError(
                    f"node ranks {', '.join(missing)} of {self._node.nodes} did not join within"
                    f" {self._timeout_seconds:.0f}s"
                ) from error

    def leave(self, pause: Callable[[float], None]) -> None:
        """Leave; node rank 0 keeps its store open until the others have left, for at most a minute."""
        self._store.set(f"{_LEFT}/{self._node.node_rank}", "")
        if self._node.node_rank == 0:
            deadline = time.monotonic() + LEAVE_TIMEOUT_SECONDS
            while not self._store.check(self._keys(_LEFT)) and time.monotonic() < deadline:
                pause(0.1)

    def _keys(self, prefix: str) -> list[str]:
        return [f"{prefix}/{rank}" for rank in range(self._node.nodes)]
