"""Measured times of a start or recovery, in total and by stage."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.table import Figures

STARTED = "job applied to its first step"
RECOVERED = "rank killed to the first step of the next attempt"

Stages = dict[str, float]
StartAndRecovery = tuple[Figures, Figures]  # figures of start and recovery


@dataclass(frozen=True)
class StageTimes:
    """Unix times of the stages.

    reported: times that the program logs. stopped_at: end of the previous attempt.
    """

    created: float
    running: float
    reported: Mapping[str, float]
    stopped_at: float | None = None


def compute_stages(title: str, started_at: float, times: StageTimes) -> Stages:
    """Return the seconds from `started_at` until each stage."""
    reported = times.reported
    stage_times = {
        title: reported["step 1"],
        **({"  until the operator stopped the attempt": times.stopped_at} if times.stopped_at else {}),
        "  until its pods are created": times.created,
        "  until both pods are running": times.running,
        "  until rank 0 has imported torch": reported["imported"],
        "  until it has joined the process group": reported["joined"],
    }
    return {title: round(reached_at - started_at, 3) for title, reached_at in stage_times.items()}


def add_stages(totals: StartAndRecovery, stages: tuple[Stages, Stages]) -> None:
    """Append the seconds of one run to the figures."""
    for figures, seconds in zip(totals, stages, strict=True):
        for title, seconds_taken in seconds.items():
            figures.setdefault(title, []).append(seconds_taken)


def summarise(figures: Figures) -> dict[str, str]:
    """Return the median, minimum and maximum of each figure."""
    return {
        title: f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"
        for title, values in figures.items()
    }
