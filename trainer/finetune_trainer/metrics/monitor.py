"""Monitor the throughput and memory of all ranks."""

from collections import deque
from statistics import fmean

import torch
from transformers import TrainingArguments

from finetune_api.v1alpha1.methods import Dpo
from finetune_trainer.distributed.collectives import all_gather_numbers
from finetune_trainer.metrics.flops import estimate_flops, peak_flops
from finetune_trainer.metrics.slow_rank import SlowRank, find_slow_rank
from finetune_trainer.metrics.step_meter import MeasuredInterval, StepMeter
from finetune_trainer.metrics.throughput import CrossRankSummary, summarise_ranks

_SLOW_RANK_WINDOW = 20  # number of averaged log entries, so that one long sample does not mark a rank as slow


class Monitor:
    """Gathers the measurements of all ranks with a single collective per log entry."""

    def __init__(self, meter: StepMeter, *, peak_flops: float | None) -> None:
        """Create a monitor. peak_flops: peak FLOP/s of one GPU; None if unknown."""
        self.meter = meter
        self.latest_summary: CrossRankSummary | None = None
        self._peak_flops = peak_flops
        self._own_step_seconds: deque[tuple[float, ...]] = deque(maxlen=_SLOW_RANK_WINDOW)

    def gather_summary(self) -> CrossRankSummary:
        """Return the summary of all ranks for the time since the last call (collective)."""
        gathered_measurements = all_gather_numbers(self.meter.collect())
        summary = summarise_ranks(
            [MeasuredInterval(*numbers) for numbers in gathered_measurements], peak_flops=self._peak_flops
        )
        self._own_step_seconds.append(summary.own_step_seconds)
        self.latest_summary = summary
        return summary

    @property
    def own_step_seconds(self) -> tuple[float, ...]:
        """Mean seconds per step of each rank over the last log entries, without the wait for other ranks."""
        return tuple(fmean(values) for values in zip(*self._own_step_seconds, strict=True))

    @property
    def slow_rank(self) -> SlowRank | None:
        """The rank that was slow over the last log entries; None if there is none."""
        return find_slow_rank(self.own_step_seconds) if self._own_step_seconds else None


def build_monitor(
    model: torch.nn.Module, args: TrainingArguments, dpo: Dpo | None, *, unused_modules: tuple[str, ...]
) -> Monitor:
    """Build the monitor of a run. Call it before the model is wrapped or sharded, which hides parameter sizes.

    unused_modules: modules that text does not reach (spec.model.textOnly).
    """
    options = args.activation_checkpointing_kwargs  # None without activation checkpointing
    device, on_gpu = args.device, args.device.type == "cuda"
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    meter = StepMeter(
        estimate_flops(
            model, has_reference=dpo is not None and not dpo.precompute_ref_log_probs, unused_modules=unused_modules
        ),
        sequences_per_sample=1 if dpo is None else 2,
        device=device,
        recomputed_share=1 / options["every_n_layers"] if options else 0.0,
    )
    peak = peak_flops(torch.cuda.get_device_name(device), dtype) if on_gpu else None
    return Monitor(meter, peak_flops=peak)
