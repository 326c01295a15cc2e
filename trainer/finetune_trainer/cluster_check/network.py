"""Measures the bandwidth between ranks before training, and checks the result of a collective.

The bus bandwidth of an all-reduce of S bytes over n ranks in t seconds is 2 (n - 1) / n x S / t, as in NVIDIA's
nccl-tests (doc/PERFORMANCE.md): it does not depend on n, and equals the speed of the slowest link if it is the limit.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from finetune_supervisor.messages import NetworkBandwidth, NodePairBandwidth
from finetune_trainer.distributed.collectives import all_gather_numbers
from finetune_trainer.distributed.rank_context import Ranks
from finetune_trainer.errors import NetworkFault

_TARGET_SECONDS = 0.05  # of one measured collective
_MIN_BYTES, _MAX_GPU_BYTES, _MAX_CPU_BYTES = 1 << 16, 1 << 28, 1 << 25
_REPETITIONS = 3
_MAX_ROUNDS = 16  # of pairs that exchange data at the same time, so that the check of many nodes stays short
MAX_LISTED_PAIRS = 64
_GIGABIT = 1e9 / 8


@dataclass(frozen=True)
class _Measurement:
    size_bytes: int
    seconds: float  # median of the slowest rank


def measure_network(ranks: Ranks, device: torch.device) -> NetworkBandwidth | None:
    """Measure all-reduces over all ranks and within each node, and the exchange of each pair of nodes (collective).

    Return None for a single rank. Raises: NetworkFault, on the ranks that received a wrong sum.
    """
    if ranks.world_size == 1:
        return None
    check_sum(ranks, device)
    total = _measure(lambda tensor: dist.all_reduce(tensor), device)
    bandwidth = NetworkBandwidth(all_reduce_gbps=_compute_bus_bandwidth(total, ranks.world_size))
    if ranks.node_count == 1:
        return bandwidth
    within = _measure_within_nodes(ranks, device) if ranks.local_world_size > 1 else None
    pairs = sorted(_measure_pairs(ranks, device, size_bytes=total.size_bytes), key=lambda pair: pair.gbps)
    return NetworkBandwidth(bandwidth.all_reduce_gbps, within, tuple(pairs[:MAX_LISTED_PAIRS]))


def check_sum(ranks: Ranks, device: torch.device) -> None:
    """Raise NetworkFault if an all-reduce returns a wrong sum on this rank."""
    tensor = torch.full((_MIN_BYTES,), float(ranks.rank + 1), device=device)
    dist.all_reduce(tensor)
    expected = ranks.world_size * (ranks.world_size + 1) / 2
    if wrong := int((tensor != expected).sum()):
        raise NetworkFault(
            f"rank {ranks.rank} received {wrong} wrong elements of an all-reduce over {ranks.world_size} ranks; have"
            " the network adapters and the NVLink connections of its Kubernetes node checked"
        )


def schedule_pairs(node_count: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield rounds of disjoint pairs that contain every pair of nodes once (circle method)."""
    nodes: list[int | None] = [*range(node_count), *([None] if node_count % 2 else [])]
    half = len(nodes) // 2
    for _ in range(len(nodes) - 1):
        matched = zip(nodes[:half], reversed(nodes[half:]), strict=True)
        yield tuple((min(a, b), max(a, b)) for a, b in matched if a is not None and b is not None)
        nodes = [nodes[0], nodes[-1], *nodes[1:-1]]


def _measure_within_nodes(ranks: Ranks, device: torch.device) -> float:
    """Return the bus bandwidth within the slowest node in Gbit/s."""
    size, own_node = ranks.local_world_size, ranks.rank // ranks.local_world_size
    groups = [dist.new_group([node * size + rank for rank in range(size)]) for node in range(ranks.node_count)]
    measured = _measure(lambda tensor: dist.all_reduce(tensor, group=groups[own_node]), device)
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return _compute_bus_bandwidth(measured, size)


def _measure_pairs(ranks: Ranks, device: torch.device, *, size_bytes: int) -> Iterator[NodePairBandwidth]:
    """Yield the bandwidth of each direction between the nodes of each pair, summed over their ranks."""
    own_node, local_rank = divmod(ranks.rank, ranks.local_world_size)
    outgoing, incoming = (torch.ones(size_bytes // 4, device=device) for _ in range(2))
    for number, pairs in enumerate(schedule_pairs(ranks.node_count)):
        if number == _MAX_ROUNDS:
            return
        peers = dict(pairs) | {b: a for a, b in pairs}
        peer_node = peers.get(own_node)
        seconds = 0.0
        for attempt in range(2):  # the first exchange opens the connections
            dist.barrier()
            started_at = time.perf_counter()
            if peer_node is not None:
                _exchange(outgoing, incoming, peer=peer_node * ranks.local_world_size + local_rank)
            seconds = time.perf_counter() - started_at if attempt else seconds
        slowest = _find_slowest_ranks(seconds, ranks)
        for a, b in pairs:
            size = ranks.local_world_size * size_bytes
            yield NodePairBandwidth(f"{a}-{b}", _round(size / max(slowest[a], slowest[b], 1e-9) / _GIGABIT))


def _exchange(outgoing: torch.Tensor, incoming: torch.Tensor, *, peer: int) -> None:
    operations = [dist.P2POp(dist.isend, outgoing, peer), dist.P2POp(dist.irecv, incoming, peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    _synchronize(outgoing.device)


def _find_slowest_ranks(seconds: float, ranks: Ranks) -> list[float]:
    """Return the longest duration of a rank of each node (collective)."""
    durations = [duration for (duration,) in all_gather_numbers((seconds,))]
    size = ranks.local_world_size
    return [max(durations[node * size : (node + 1) * size]) for node in range(ranks.node_count)]


def _measure(communicate: Callable[[torch.Tensor], object], device: torch.device) -> _Measurement:
    """Measure a collective with the size that takes about _TARGET_SECONDS, which all ranks choose together."""
    _time_collective(communicate, _MIN_BYTES, device)  # the first call opens the connections
    size_bytes, seconds = _MIN_BYTES, _time_collective(communicate, _MIN_BYTES, device)
    max_bytes = _MAX_GPU_BYTES if device.type == "cuda" else _MAX_CPU_BYTES
    while seconds < _TARGET_SECONDS / 2 and size_bytes < max_bytes:
        size_bytes = min(4 * size_bytes, max_bytes)
        seconds = _time_collective(communicate, size_bytes, device)
    return _Measurement(size_bytes, statistics.median(_repeat(communicate, size_bytes, device)))


def _repeat(communicate: Callable[[torch.Tensor], object], size_bytes: int, device: torch.device) -> list[float]:
    return [_time_collective(communicate, size_bytes, device) for _ in range(_REPETITIONS)]


def _time_collective(communicate: Callable[[torch.Tensor], object], size_bytes: int, device: torch.device) -> float:
    """Return the seconds that the collective takes on the slowest rank."""
    tensor = torch.ones(size_bytes // 4, device=device)
    dist.barrier()
    _synchronize(device)
    started_at = time.perf_counter()
    communicate(tensor)
    _synchronize(device)
    return max(duration for (duration,) in all_gather_numbers((time.perf_counter() - started_at,)))


def _compute_bus_bandwidth(measured: _Measurement, rank_count: int) -> float:
    """Return the bus bandwidth in Gbit/s."""
    return _round(2 * (rank_count - 1) / rank_count * measured.size_bytes / max(measured.seconds, 1e-9) / _GIGABIT)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _round(value: float) -> float:
    return float(f"{value:.3g}")
