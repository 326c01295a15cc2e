"""Rendezvous of all nodes of an attempt, through a TCPStore in the launcher of node rank 0.

The process groups of the ranks use the same store, which stays open until all nodes have left.
"""

from __future__ import annotations

import importlib
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from finetune_supervisor.contract import Node

# The operator usually stops waiting nodes earlier, see spec.startupDeadlineSeconds.
JOIN_TIMEOUT_SECONDS = 1800.0
LEAVE_TIMEOUT_SECONDS = 60.0
LOOPBACK = "127.0.0.1"
_JOINED, _LEFT = "came", "left"  # key prefixes in the store


class RendezvousConnectionError(Exception):
    """The launcher of node rank 0 is unreachable."""


class RendezvousTimeoutError(Exception):
    """Other nodes did not join in time."""


class Rendezvous:
    """Rendezvous of one attempt; its keys contain the attempt number, so that other attempts cannot join it."""

    def __init__(self, node: Node, *, timeout_seconds: float = JOIN_TIMEOUT_SECONDS) -> None:
        """Open the store on node rank 0, or connect to it on other nodes.

        Raises: RendezvousConnectionError if node rank 0 is unreachable; RuntimeError if the port is in use.
        """
        dist: Any = importlib.import_module(
            "torch.distributed"
        )  # lazy import, because images without torch import this module
        self._node = node
        self._timeout_seconds = timeout_seconds
        is_master, timeout = node.node_rank == 0, timedelta(seconds=timeout_seconds)
        options = {"wait_for_workers": False, **(_listen_on_loopback(node) if is_master else {})}
        try:
            store = dist.TCPStore(node.master_addr, node.master_port, None, is_master, timeout, **options)
        except RuntimeError as error:
            if is_master:
                raise
            raise RendezvousConnectionError(
                f"{node.master_addr}:{node.master_port}, the address of node rank 0, could not be reached within"
                f" {timeout_seconds:.0f}s; check network policies and spec.network.interface ({error})"
            ) from error
        self._store: Any = dist.PrefixStore(f"finetune/{node.uid}/{node.attempt}", store)

    def wait_for_all(self) -> None:
        """Join the rendezvous and wait for all other nodes. Raises RendezvousTimeoutError with the missing nodes."""
        self._store.set(f"{_JOINED}/{self._node.node_rank}", "")
        keys = self._build_keys(_JOINED)
        try:
            self._store.wait(
                keys, timedelta(seconds=self._timeout_seconds)
            )  # a single wait, because torch logs each timeout
        except RuntimeError as error:
            missing_ranks = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
            if missing_ranks:
                raise RendezvousTimeoutError(
                    f"node ranks {', '.join(missing_ranks)} of {self._node.num_nodes} did not join within"
                    f" {self._timeout_seconds:.0f}s"
                ) from error

    def leave(self, pause: Callable[[float], None]) -> None:
        """Leave the rendezvous; node rank 0 keeps its store open until the others have left, for at most one minute."""
        self._store.set(f"{_LEFT}/{self._node.node_rank}", "")
        if self._node.node_rank == 0:
            deadline = time.monotonic() + LEAVE_TIMEOUT_SECONDS
            while not self._store.check(self._build_keys(_LEFT)) and time.monotonic() < deadline:
                pause(0.1)

    def _build_keys(self, prefix: str) -> list[str]:
        return [f"{prefix}/{rank}" for rank in range(self._node.num_nodes)]


def _listen_on_loopback(node: Node) -> dict[str, int]:
    """Return the option with which the store of a local run listens on its own address instead of all interfaces."""
    if node.master_addr != LOOPBACK:
        return {}
    return {"master_listen_fd": socket.create_server((LOOPBACK, node.master_port)).detach()}  # torch closes it
