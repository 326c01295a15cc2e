"""Where the nodes of an attempt meet: a TCPStore of node rank 0's launcher.

The process groups of the ranks use it too. It outlives them, so that the last to leave still finds it.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from finetune_supervisor.contract import Node

MEET_SECONDS = 1800.0  # the operator releases nodes that wait for others earlier (spec.startupDeadlineSeconds)
LEAVE_SECONDS = 60.0


class RendezvousConnectionError(Exception):
    """The launcher of node rank 0 cannot be reached."""


class RendezvousTimeoutError(Exception):
    """Other nodes did not come."""


class Meeting:
    """One attempt's: those of another attempt that find this store wait for each other in vain."""

    def __init__(self, node: Node, *, seconds: float = MEET_SECONDS) -> None:
        """Opened by node rank 0, reached by the others. Raises RendezvousConnectionError, or what torch says of a port
        that is taken."""
        dist: Any = importlib.import_module("torch.distributed")  # only here: images without it read this package
        self._node = node
        self._seconds = seconds
        opens, limit = node.node_rank == 0, timedelta(seconds=seconds)
        try:
            store = dist.TCPStore(node.master_addr, node.master_port, None, opens, limit, wait_for_workers=False)
        except RuntimeError as error:
            if opens:
                raise
            raise RendezvousConnectionError(
                f"{node.master_addr}:{node.master_port}, the address of node rank 0, could not be reached within"
                f" {seconds:.0f}s; check network policies and spec.network.interface ({error})"
            ) from error
        self._store: Any = dist.PrefixStore(f"finetune/{node.uid}/{node.attempt}", store)

    def wait_for_all(self) -> None:
        """Raises RendezvousTimeoutError, which names who is missing."""
        self._store.set(f"came/{self._node.node_rank}", "")
        everybody = self._keys("came")
        try:
            self._store.wait(everybody, timedelta(seconds=self._seconds))  # at once: torch logs each wait that runs out
        except RuntimeError as error:
            missing = [str(rank) for rank, key in enumerate(everybody) if not self._store.check([key])]
            if missing:
                raise RendezvousTimeoutError(
                    f"node ranks {', '.join(missing)} of {self._node.nodes} did not come within {self._seconds:.0f}s"
                ) from error

    def leave(self, pause: Callable[[float], None]) -> None:
        """Node rank 0 stays for a while, until the others need its store no more."""
        self._store.set(f"left/{self._node.node_rank}", "")
        if self._node.node_rank == 0:
            until = time.monotonic() + LEAVE_SECONDS
            while not self._store.check(self._keys("left")) and time.monotonic() < until:
                pause(0.1)

    def _keys(self, what: str) -> list[str]:
        return [f"{what}/{rank}" for rank in range(self._node.nodes)]
