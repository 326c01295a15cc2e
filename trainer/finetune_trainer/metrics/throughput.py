"""Compute the throughput of all ranks from the measurements of each rank."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from finetune_supervisor.messages import PeakMemory
from finetune_trainer.metrics.memory_peaks import find_memory_peaks
from finetune_trainer.metrics.step_meter import MeasuredInterval
from finetune_trainer.units import GIB

DATA_BOUND_SHARE = 0.20  # a run is data-bound if steps spend more than this share waiting for data
SPEED_METRICS = (  # fields of CrossRankSummary and of TrainingProgress
    "step_seconds",
    "tokens_per_second",
    "samples_per_second",
    "mfu",
    "tokens_per_second_per_rank",
    "scaling_efficiency",
    "gpu_utilization",
    "data_wait_share",
)
LOGGED_METRICS = (*SPEED_METRICS, "peak_memory_gib")


@dataclass(frozen=True)
class CrossRankSummary:
    """Measurements of one interval over all ranks. The log and status.progress use the names of the first fields."""

    step_seconds: float
    tokens_per_second: float
    samples_per_second: float
    mfu: float | None
    tokens_per_second_per_rank: float
    scaling_efficiency: float | None  # estimated share of a step in which the ranks compute; None for a single rank
    gpu_utilization: float | None  # mean over the GPUs, 0 to 1
    data_wait_share: float  # maximum over the ranks, because the slowest rank determines the step time
    own_step_seconds: tuple[float, ...]  # one value per rank, see MeasuredInterval.own_step_seconds
    peak_bytes: tuple[int, ...]  # one value per rank
    memory: PeakMemory  # without the forecast

    def to_log_values(self) -> dict[str, float]:
        """Return the values for trainer_state.json and the trackers by name."""
        values = {name: getattr(self, name) for name in SPEED_METRICS}
        values["peak_memory_gib"] = self.memory.peak_highest / GIB
        return {name: _round_value(value) for name, value in values.items() if value is not None}


def summarise_ranks(intervals: Sequence[MeasuredInterval], *, peak_flops: float | None) -> CrossRankSummary:
    """Combine the measurements of all ranks over the same steps.

    intervals: in rank order. peak_flops: peak FLOP/s of one GPU; if it is None, MFU is None.
    """
    seconds = max(max(interval.seconds for interval in intervals), 1e-9)
    flops = sum(interval.flops for interval in intervals)
    tokens_per_second = sum(interval.tokens for interval in intervals) / seconds
    utilizations = [each.gpu_utilization for each in intervals if not math.isnan(each.gpu_utilization)]
    return CrossRankSummary(
        step_seconds=seconds / max(intervals[0].steps, 1),
        tokens_per_second=tokens_per_second,
        samples_per_second=sum(interval.samples for interval in intervals) / seconds,
        mfu=flops / (seconds * peak_flops * len(intervals)) if peak_flops else None,
        tokens_per_second_per_rank=tokens_per_second / len(intervals),
        scaling_efficiency=_estimate_efficiency(intervals, seconds) if len(intervals) > 1 else None,
        gpu_utilization=fmean(utilizations) if utilizations else None,
        data_wait_share=max(interval.data_wait_seconds / max(interval.seconds, 1e-9) for interval in intervals),
        own_step_seconds=tuple(interval.own_step_seconds for interval in intervals),
        peak_bytes=tuple(int(interval.peak_bytes) for interval in intervals),
        memory=find_memory_peaks(intervals),
    )


def describe_speed(summary: CrossRankSummary) -> dict[str, Any]:
    """Return the speed of all ranks as fields of TrainingProgress; unknown values are None."""
    return {name: summary.to_log_values().get(name) for name in SPEED_METRICS}


def _estimate_efficiency(intervals: Sequence[MeasuredInterval], seconds: float) -> float:
    """Return the estimated share of the time in which the ranks compute, at most 1.

    seconds: duration of the interval on the slowest rank.
    """
    return min(fmean(interval.compute_seconds for interval in intervals) / seconds, 1.0)


def _round_value(value: float) -> float:
    """Round to six significant digits; the measurements are less accurate."""
    return float(f"{value:.6g}")
