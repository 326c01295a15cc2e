"""Describes what slows a user command down or makes its result wrong, as far as it can be seen from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from finetune_supervisor.contract import Node
from finetune_supervisor.messages import Degradation

CHECK_INTERVAL_SECONDS = 15.0
# A program may prepare its data for minutes before it joins the process group or uses a GPU.
GRACE_SECONDS = 300.0
_BUSY_BYTES = 2 << 30  # a GPU with at least this much used memory is used by the program
_EMPTY_BYTES = 1 << 30  # a GPU with less has at most a CUDA context, or the memory that the driver reserves


@dataclass(frozen=True)
class CommandState:
    """Observed state of a command's processes and GPUs."""

    ranks: frozenset[int]  # global ranks whose processes run on this node
    connected_ranks: frozenset[int]  # those with a connection to the store of their process group
    gpu_bytes: Sequence[int] = ()  # used memory of each GPU; empty if unknown


class CommandChecks:
    """Derives the degradations of the command on this node; `now` arguments are seconds of a monotonic clock.

    planned_gpus: GPUs in the limits of the container. If another number is visible, GPUs are not checked.
    """

    def __init__(self, node: Node, observe: Callable[[], CommandState], *, planned_gpus: int) -> None:
        self._node = node
        self._observe = observe
        self._planned_gpus = planned_gpus
        self._checked_at: float | None = None
        self._first_seen: dict[int, float] = {}
        self._joined: set[int] = set()
        self._partly_used_since: float | None = None
        self._degraded: tuple[Degradation, ...] = ()

    def update(self, *, now: float) -> tuple[Degradation, ...]:
        """Return the degradations; observe the command again if the last observation is old enough."""
        if self._checked_at is None or now - self._checked_at >= CHECK_INTERVAL_SECONDS:
            self._checked_at = now
            state = self._observe()
            self._degraded = (*self._check_ranks(state, now=now), *self._check_gpus(state, now=now))
        return self._degraded

    def _check_ranks(self, state: CommandState, *, now: float) -> Iterator[Degradation]:
        self._joined |= state.connected_ranks
        self._first_seen = {rank: self._first_seen.get(rank, now) for rank in state.ranks}
        alone = sorted(
            rank
            for rank, since in self._first_seen.items()
            if rank not in self._joined and now - since >= GRACE_SECONDS
        )
        if alone:
            listed = ", ".join(map(str, alone[:8])) + (", ..." if len(alone) > 8 else "")
            yield Degradation(
                "RanksAlone",
                f"{len(alone)} of {len(state.ranks)} ranks of node {self._node.node_rank} ({listed}) have no connection"
                f" to MASTER_ADDR:MASTER_PORT {GRACE_SECONDS / 60:.0f} minutes after their start, so each of them may"
                " train alone; let the program call torch.distributed.init_process_group, or use a Trainer that does",
            )

    def _check_gpus(self, state: CommandState, *, now: float) -> Iterator[Degradation]:
        total = len(state.gpu_bytes)
        used = sum(size >= _BUSY_BYTES for size in state.gpu_bytes)
        empty = sum(size < _EMPTY_BYTES for size in state.gpu_bytes)
        if total != self._planned_gpus or not used or not empty:
            self._partly_used_since = None
            return
        if self._partly_used_since is None:
            self._partly_used_since = now
        if now - self._partly_used_since < GRACE_SECONDS:
            return
        node = f"of node {self._node.node_rank}"
        if len(state.ranks) > total - empty:
            yield Degradation(
                "SharedGpu",
                f"{len(state.ranks)} ranks {node} share {total - empty} of its {total} GPUs, the others are empty;"
                " select the GPU by LOCAL_RANK, and do not set CUDA_VISIBLE_DEVICES in the program",
            )
        else:
            yield Degradation(
                "IdleGpus",
                f"{empty} of {total} GPUs {node} have been empty for {GRACE_SECONDS / 60:.0f} minutes; use them, or"
                " lower resources.limits",
            )
