"""What is measured: the whole of a start or a recovery and, indented, when each of its stages was reached."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.table import Figures

STARTED = "job applied to its first step"
RECOVERED = "rank killed to the first step of the next attempt"

Stages = dict[str, float]
Both = tuple[Figures, Figures]  # of the start, and of the recovery


@dataclass(frozen=True)
class Moments:
    """In Unix time; `told` is what the program says of itself, `stopped` when the attempt before was given up."""

    made: float
    running: float
    told: Mapping[str, float]
    stopped: float | None = None


def by_stage(title: str, since: float, moments: Moments) -> Stages:
    """Seconds `since` then."""
    told = moments.told
    reached = {
        title: told["step 1"],
        **({"  until the operator stopped the attempt": moments.stopped} if moments.stopped else {}),
        "  until its pods are made": moments.made,
        "  until both are seen to run": moments.running,
        "  until rank 0 has imported torch": told["imported"],
        "  until it has joined the group": told["joined"],
    }
    return {title: round(moment - since, 3) for title, moment in reached.items()}


def note(known: Both, stages: tuple[Stages, Stages]) -> None:
    """One more of each."""
    for figures, seconds in zip(known, stages, strict=True):
        for title, taken in seconds.items():
            figures.setdefault(title, []).append(taken)


def summarise(figures: Figures) -> dict[str, str]:
    """Medians, with the least and the most."""
    return {
        title: f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"
        for title, values in figures.items()
    }
