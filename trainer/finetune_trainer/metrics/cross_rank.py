"""What the measurements of all ranks say together: speed, who is slow, and how much memory was needed."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from finetune_trainer.memory.gpus import GIB
from finetune_trainer.metrics.throughput import Interval

SLOW = 0.10  # above the median rank's own time, a rank is named
DATA_BOUND = 0.20  # of the time of steps spent waiting for data, a warning is due


@dataclass(frozen=True)
class Slow:
    """The slowest rank, and by which share it takes longer than the median rank."""

    rank: int
    excess: float

    def __str__(self) -> str:
        return f"rank {self.rank} +{self.excess:.0%}"


@dataclass(frozen=True)
class Peaks:
    """The most memory that ranks have held."""

    lowest: int
    lowest_rank: int
    highest: int
    highest_rank: int
    reserved: int  # by torch's allocator, of the rank with the highest peak; 0 on CPU
    step: int  # of the highest peak
    longest: int  # tokens of the longest sequence of that step


@dataclass(frozen=True)
class Summary:
    """One interval of all ranks. Names are those of the log and of status.progress."""

    step_seconds: float
    tokens_per_second: float
    samples_per_second: float
    mfu: float | None
    data_wait_share: float  # of the rank that waited most: a step takes as long as its slowest rank
    own_seconds: tuple[float, ...]  # per step, by rank
    peaks: tuple[int, ...]  # bytes, by rank
    memory: Peaks

    def as_log(self) -> dict[str, float]:
        """The numbers of trainer_state.json, TensorBoard and the others."""
        values = {
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "samples_per_second": self.samples_per_second,
            "mfu": self.mfu,
            "data_wait_share": self.data_wait_share,
            "peak_memory_gib": self.memory.highest / GIB,
        }
        return {name: _round(value) for name, value in values.items() if value is not None}


LOGGED = ("step_seconds", "tokens_per_second", "samples_per_second", "mfu", "data_wait_share", "peak_memory_gib")


def summarise(ranks: Sequence[Interval], *, peak_flops: float | None) -> Summary:
    """`ranks` by rank, all of the same steps."""
    seconds = max(max(each.seconds for each in ranks), 1e-9)
    flops = sum(each.flops for each in ranks)
    return Summary(
        step_seconds=seconds / max(ranks[0].steps, 1),
        tokens_per_second=sum(each.tokens for each in ranks) / seconds,
        samples_per_second=sum(each.samples for each in ranks) / seconds,
        mfu=flops / (seconds * peak_flops * len(ranks)) if peak_flops else None,
        data_wait_share=max(each.waited_seconds / max(each.seconds, 1e-9) for each in ranks),
        own_seconds=tuple(each.own_seconds for each in ranks),
        peaks=tuple(int(each.peak_memory) for each in ranks),
        memory=compare_memory(ranks),
    )


def find_slow(own_seconds: Sequence[float]) -> Slow | None:
    """The slowest rank, if it stands out."""
    middle, slowest = median_low(own_seconds), max(own_seconds)
    if middle <= 0 or slowest <= middle * (1 + SLOW):
        return None
    return Slow(own_seconds.index(slowest), slowest / middle - 1)


def compare_memory(ranks: Sequence[Interval]) -> Peaks:
    """Of equal peaks the first counts."""
    peaks = [int(each.peak_memory) for each in ranks]
    highest = peaks.index(max(peaks))
    return Peaks(
        lowest=min(peaks),
        lowest_rank=peaks.index(min(peaks)),
        highest=max(peaks),
        highest_rank=highest,
        reserved=int(ranks[highest].reserved_memory),
        step=int(ranks[highest].peak_step),
        longest=int(ranks[highest].peak_longest),
    )


def _round(value: float) -> float:
    """Six digits are more than any of it is worth."""
    return float(f"{value:.6g}")
