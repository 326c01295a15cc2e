"""Average losses and metrics over the loss units of the effective batch, independent of the number of ranks."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from finetune_trainer.distributed.collectives import sum_over_ranks

_UNITS = "units"


def compute_divisors(
    unit_counts: Iterable[tuple[float, ...]], *, across_ranks: bool, stop_requested: bool
) -> tuple[torch.Tensor, bool]:
    """Return the divisor of each loss term, (terms,) on the CPU, and whether any rank has a stop request (collective).

    unit_counts: one tuple per micro-batch of this rank, one value per loss term.
    across_ranks: whether to sum over all ranks.
    The same collective sums units and stop requests, so that all ranks stop after the same step.
    """
    local_units = tuple(sum(term) for term in zip(*unit_counts, strict=True))
    *global_units, stop_requests = sum_over_ranks((*local_units, stop_requested))
    units = torch.tensor(global_units if across_ranks else local_units, dtype=torch.float64)
    # Avoid a division by zero: the samples of a rank may all be fillers, which have no units.
    return torch.where(units > 0, units, 1.0), stop_requests > 0


class MetricSums:
    """Accumulates a method's metrics over loss units since the last log entry."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, units: torch.Tensor, sums: dict[str, torch.Tensor]) -> None:
        """Add metric sums over `units` loss units."""
        for name, value in {**sums, _UNITS: units}.items():
            self._sums[name] = self._sums.get(name, 0) + value.detach().double()

    def reduce_means(self) -> dict[str, float]:
        """Return the means over all ranks since the last call (collective). All ranks must have the same metrics."""
        if not self._sums:
            return {}
        names = sorted(self._sums)
        sums = torch.stack([self._sums[name] for name in names])
        self._sums = {}
        torch.distributed.all_reduce(sums)
        global_sums = dict(zip(names, sums.tolist(), strict=True))
        global_units = max(global_sums.pop(_UNITS), 1.0)
        return {name: value / global_units for name, value in global_sums.items()}

    @contextmanager
    def reset_temporarily(self) -> Iterator[None]:
        """Use empty sums in the `with` block, and restore the previous sums afterwards."""
        sums, self._sums = self._sums, {}
        yield
        self._sums = sums
