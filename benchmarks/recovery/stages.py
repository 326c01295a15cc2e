"""Measured durations of a start or a recovery, in total and by stage."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.table import Figures

STARTED = "job applied to its first step"
RECOVERED = "rank killed to the first step of the next attempt"

StageSeconds = dict[str, float]
StartAndRecovery = tuple[Figures, Figures]  # figures of the start, and figures of the recovery


@dataclass(frozen=True)
class StageTimes:
    """Unix times at which an attempt reached its stages.

    logged_at: times that the program logs, by stage. stopped_at: end of the previous attempt.
    """

    created_at: float
    running_at: float
    logged_at: Mapping[str, float]
    stopped_at: float | None = None


def compute_stage_seconds(title: str, started_at: float, times: StageTimes) -> StageSeconds:
    """Return the seconds from `started_at` until each stage."""
    logged_at = times.logged_at
    stage_times = {
        title: logged_at["step 1"],
        **({"  until the operator stopped the attempt": times.stopped_at} if times.stopped_at else {}),
        "  until its pods are created": times.created_at,
        "  until both pods are running": times.running_at,
        "  until rank 0 has imported torch": logged_at["imported"],
        "  until it has joined the process group": logged_at["joined"],
    }
    return {title: round(reached_at - started_at, 3) for title, reached_at in stage_times.items()}


def append_stage_seconds(start_and_recovery: StartAndRecovery, run_seconds: tuple[StageSeconds, StageSeconds]) -> None:
    """Append the durations of one run to the figures."""
    for figures, stage_seconds in zip(start_and_recovery, run_seconds, strict=True):
        for title, seconds in stage_seconds.items():
            figures.setdefault(title, []).append(seconds)


def summarise_figures(figures: Figures) -> dict[str, str]:
    """Return the median, minimum and maximum of each figure."""
    return {
        title: f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"
        for title, values in figures.items()
    }
