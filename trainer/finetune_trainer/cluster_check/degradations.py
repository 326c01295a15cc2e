"""Describes what makes a job slower or less accurate than its hardware allows."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from finetune_api.v1alpha1.training import Preflight
from finetune_supervisor.messages import Degradation, NetworkBandwidth, NodePairBandwidth
from finetune_trainer.cluster_check.nccl_log import SOCKETS
from finetune_trainer.distributed.rank_context import Ranks
from finetune_trainer.errors import NetworkFault
from finetune_trainer.units import GIB

DATA_BOUND = "DataBound"
_MAX_CLOCK_SKEW_SECONDS = 5.0
_MAX_FOREIGN_BYTES = 2 * GIB  # GPU memory in use before the trainer allocates any, above the CUDA context
_MIN_RELATIVE_BANDWIDTH = 0.5  # of a pair of nodes, compared with the median pair


@dataclass(frozen=True)
class RankFacts:
    """Facts about one rank, which rank 0 gathers."""

    clock: float  # seconds since the epoch, read at the same time on all ranks
    gpu: str = ""  # uuid; empty on CPU
    visible_gpus: int = 0
    foreign_bytes: int = 0  # GPU memory in use before the trainer allocated any
    transport: str = ""  # network that NCCL uses; empty if unknown


def describe_cluster(
    facts: Sequence[RankFacts], network: NetworkBandwidth | None, ranks: Ranks
) -> Iterator[Degradation]:
    """Yield the degradations of GPUs, clocks and network.

    facts: one entry per rank, in rank order.
    """
    nodes = [facts[first : first + ranks.local_world_size] for first in range(0, len(facts), ranks.local_world_size)]
    yield from _describe_gpus(nodes)
    if ranks.node_count > 1 and any(rank.transport == SOCKETS for rank in facts):
        yield Degradation(
            "NetworkSockets",
            "NCCL exchanges data between the nodes by TCP sockets; if they have InfiniBand or RoCE, request its devices"
            " (spec.resources.limits, such as rdma/hca) and allow IPC_LOCK (docs/operations/installation.md)",
        )
    skew = max(rank.clock for rank in facts) - min(rank.clock for rank in facts)
    if skew > _MAX_CLOCK_SKEW_SECONDS:
        yield Degradation(
            "ClockSkew", f"the clocks of the nodes differ by {skew:.0f} s; synchronize them, for example by chrony"
        )
    yield from _describe_slow_pairs(network)


def describe_compute(
    device: torch.device, dtype: torch.dtype, *, requested_dtype: str, attention: str, requested_attention: str
) -> Iterator[Degradation]:
    """Yield the degradations of the computation on a GPU that the spec does not request."""
    if device.type != "cuda":
        return
    if dtype is torch.float32 and requested_dtype == "auto":
        yield Degradation(
            "Float32",
            "the model is stored in float32, so it is trained in float32, which is several times slower than 16 bits;"
            " set spec.model.torchDtype: bfloat16",
        )
    if attention == "eager" and requested_attention == "auto":
        yield Degradation(
            "SlowAttention",
            "the model does not support fused attention, so attention needs memory for every pair of tokens; choose a"
            " model that supports it, or shorten the rows (spec.dataset.maxLength)",
        )


def require_bandwidth(network: NetworkBandwidth | None, preflight: Preflight) -> None:
    """Raise NetworkFault if a bandwidth is lower than the spec requires."""
    if network is None:
        return
    required = preflight.min_inter_node_gbps
    slow = [pair for pair in network.pairs if required is not None and pair.gbps < required]
    if slow:
        worst = _find_common_node(slow)
        raise NetworkFault(
            f"{len(slow)} of {len(network.pairs)} pairs of nodes exchange less than {required:g} Gbit/s"
            f" (spec.training.preflight.minInterNodeGbps), the slowest of them {slow[0].nodes} with {slow[0].gbps:g};"
            f" node {worst} is part of most of them"
        )
    required = preflight.min_intra_node_gbps
    measured = network.intra_node_gbps
    if required is not None and measured is not None and measured < required:
        raise NetworkFault(
            f"an all-reduce within a node reaches {measured:g} Gbit/s, less than {required:g}"
            " (spec.training.preflight.minIntraNodeGbps)"
        )


def _find_common_node(pairs: Sequence[NodePairBandwidth]) -> int:
    """Return the node that is part of most of the pairs."""
    nodes = [int(node) for pair in pairs for node in pair.nodes.split("-")]
    return statistics.mode(nodes)


def _describe_gpus(nodes: Sequence[Sequence[RankFacts]]) -> Iterator[Degradation]:
    for number, ranks in enumerate(nodes):
        gpus = [rank.gpu for rank in ranks if rank.gpu]
        if len(set(gpus)) < len(gpus):
            yield Degradation(
                "SharedGpu", f"{len(gpus)} ranks of node {number} share {len(set(gpus))} GPUs; use one GPU per rank"
            )
        elif gpus and ranks[0].visible_gpus > len(gpus):
            idle = ranks[0].visible_gpus - len(gpus)
            yield Degradation(
                "IdleGpus",
                f"node {number} has {ranks[0].visible_gpus} GPUs, of which {idle} are idle; raise spec.nprocPerNode, or"
                " lower resources.limits",
            )
        used = max((rank.foreign_bytes for rank in ranks), default=0)
        if used > _MAX_FOREIGN_BYTES:
            yield Degradation(
                "GpuInUse",
                f"other processes use {used / GIB:.1f} GiB of a GPU of node {number}; end them, or choose another node",
            )


def _describe_slow_pairs(network: NetworkBandwidth | None) -> Iterator[Degradation]:
    pairs = network.pairs if network else ()
    if len(pairs) < 3:  # with two nodes there is nothing to compare
        return
    median = statistics.median(pair.gbps for pair in pairs)
    slow = [pair for pair in pairs if pair.gbps < _MIN_RELATIVE_BANDWIDTH * median]
    if slow:
        listed = ", ".join(f"{pair.nodes}: {pair.gbps:g}" for pair in slow[:5])
        yield Degradation(
            "SlowLink",
            f"{len(slow)} of {len(pairs)} pairs of nodes exchange less than half of the median of {median:g} Gbit/s"
            f" ({listed}); node {_find_common_node(slow)} is part of most of them",
        )
