"""The measurements of this rank and what came of those of all ranks."""

from collections import deque
from statistics import fmean

import torch

from finetune_trainer.distributed.collectives import gather_numbers
from finetune_trainer.metrics.cross_rank import Slow, Summary, find_slow, summarise
from finetune_trainer.metrics.throughput import Interval, Meter

_REMEMBERED = 20  # log lines over which a rank must be slow to be named: one long sample makes nobody slow


class Monitor:
    """Exchanges numbers once per log line, never in between."""

    def __init__(self, meter: Meter, *, device: torch.device, peak_flops: float | None) -> None:
        self.meter = meter
        self.latest: Summary | None = None
        self._device = device
        self._peak_flops = peak_flops
        self._own_seconds: deque[tuple[float, ...]] = deque(maxlen=_REMEMBERED)

    def exchange(self) -> Summary:
        """Every rank has to come here."""
        gathered = gather_numbers(self.meter.take(), self._device)
        summary = summarise([Interval(*numbers) for numbers in gathered], peak_flops=self._peak_flops)
        self._own_seconds.append(summary.own_seconds)
        self.latest = summary
        return summary

    @property
    def own_seconds(self) -> tuple[float, ...]:
        """Per step, by rank: the mean of the last log lines."""
        return tuple(fmean(values) for values in zip(*self._own_seconds, strict=True))

    @property
    def slow(self) -> Slow | None:
        return find_slow(self.own_seconds) if self._own_seconds else None
