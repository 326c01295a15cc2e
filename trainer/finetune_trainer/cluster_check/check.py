"""Runs the checks of GPUs, clocks and network before the first step, on all ranks."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from finetune_api.v1alpha1.training import Preflight
from finetune_supervisor.messages import Degradation, NetworkBandwidth
from finetune_trainer.cluster_check.degradations import RankFacts, describe_cluster, require_bandwidth
from finetune_trainer.cluster_check.gpu_counters import NvmlGpu
from finetune_trainer.cluster_check.gpus import check_device
from finetune_trainer.cluster_check.nccl_log import read_network
from finetune_trainer.cluster_check.network import measure_network
from finetune_trainer.distributed.collectives import all_gather_objects
from finetune_trainer.distributed.rank_context import Ranks


@dataclass(frozen=True)
class ClusterReport:
    """Result of the checks, equal on all ranks."""

    network: NetworkBandwidth | None = None  # None for a single rank, or without the check
    degraded: tuple[Degradation, ...] = ()
    seconds: float = 0.0

    def describe(self) -> str:
        """Return the log line about the checks."""
        if self.network is None:
            return f"preflight: devices compute correctly ({self.seconds:.1f} s)"
        return f"preflight: devices compute correctly; {self.network} ({self.seconds:.1f} s)"


def check_cluster(
    preflight: Preflight, ranks: Ranks, device: torch.device, *, foreign_bytes: int, nccl_log: Path | None
) -> ClusterReport:
    """Check devices and network, and describe what is degraded (collective).

    foreign_bytes: GPU memory in use before this rank allocated any. nccl_log: NCCL's log, if it is written.
    Raises: GpuHardware or NetworkFault, on the ranks that are affected.
    """
    started_at, network = time.perf_counter(), None
    if preflight.enabled:
        check_device(device, NvmlGpu(device).read_counters())
        network = measure_network(ranks, device)
        if ranks.is_rank_zero:
            require_bandwidth(network, preflight)
    facts = all_gather_objects(_collect_facts(device, foreign_bytes=foreign_bytes, nccl_log=nccl_log))
    degraded = tuple(describe_cluster(facts, network, ranks))
    return ClusterReport(network, degraded, time.perf_counter() - started_at)


def measure_foreign_memory(device: torch.device) -> int:
    """Return the bytes of GPU memory in use, before this rank allocates any; 0 on CPU."""
    if device.type != "cuda":
        return 0
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return total_bytes - free_bytes


def _collect_facts(device: torch.device, *, foreign_bytes: int, nccl_log: Path | None) -> RankFacts:
    dist.barrier()  # read the clocks at the same time
    clock = time.time()
    if device.type != "cuda":
        return RankFacts(clock)
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    return RankFacts(clock, gpu, torch.cuda.device_count(), foreign_bytes, read_network(nccl_log))
