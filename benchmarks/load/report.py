"""Formats the figures of all turns as tables: medians and ranges by contender, and the operator's requests."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping

from benchmarks.load.turn import TurnResult

RoundFigures = Mapping[str, list[dict[str, float]]]  # figures of each round, by title of the contender
MISSING = "-"


def render_comparison(rounds: RoundFigures, *, own_title: str) -> str:
    """Render a table with a row per figure, a column per contender and a column per ratio of ours to theirs.

    A cell contains the median of the rounds, with the range if there are several. A ratio is computed in each round.
    """
    others = [title for title in rounds if title != own_title]
    rows = [("", *rounds, *(f"{own_title}/{title}" for title in others))]
    for figure in rounds[own_title][0]:
        values = {title: [figures[figure] for figures in all_figures] for title, all_figures in rounds.items()}
        ratios = ([divide(*pair) for pair in zip(values[own_title], values[title], strict=True)] for title in others)
        rows.append((figure, *map(format_range, values.values()), *map(format_range, ratios)))
    return format_rows(rows)


def divide(own_value: float, other_value: float) -> float:
    """Return the ratio; NaN if the other value is 0 or one of them is missing."""
    return own_value / other_value if other_value else math.nan


def format_range(values: list[float]) -> str:
    """Return the median, and the minimum and maximum if they differ; NaN is a missing value."""
    if any(map(math.isnan, values)):
        return MISSING
    median, low, high = (format_number(value) for value in (statistics.median(values), min(values), max(values)))
    return median if low == high else f"{median} ({low} to {high})"


def format_number(value: float) -> str:
    """Return the number with three significant digits, but no fewer than its integer digits."""
    if value == int(value):
        return f"{value:.0f}"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"


def render_requests(turns: Iterable[TurnResult], *, jobs: int) -> str:
    """Render the operator's requests per job by verb, resource and status code, for launch and restart."""
    turns = list(turns)
    launches = [turn.launch.usage.metrics.requests for turn in turns]
    restarts = [turn.restart.usage.metrics.requests for turn in turns]
    totals: Counter[str] = sum((*launches, *restarts), Counter())
    rows: list[tuple[str, ...]] = [("operator's API requests per job", "launch", "restart")]
    rows += [
        (f"  {title}", *(format_range([counts[title] / jobs for counts in burst]) for burst in (launches, restarts)))
        for title, _ in totals.most_common()
    ]
    rows.append(
        ("  total", *(format_range([counts.total() / jobs for counts in burst]) for burst in (launches, restarts)))
    )
    return format_rows(rows)


def render_passes(turns: Iterable[TurnResult]) -> str:
    """Render how many reconcile passes of both bursts took how long, over all rounds."""
    passes: Counter[float] = Counter()
    for turn in turns:
        passes += turn.launch.usage.metrics.passes + turn.restart.usage.metrics.passes
    rows: list[tuple[str, ...]] = [("reconcile passes that took at most", "number")]
    rows += [(f"  {upper_bound:g} s", str(count)) for upper_bound, count in sorted(passes.items())]
    return format_rows(rows)


def format_rows(rows: list[tuple[str, ...]]) -> str:
    """Align the columns of a table."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)
