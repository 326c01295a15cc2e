"""Formats benchmark figures as a table, next to those of Kubeflow Trainer and JobSet, and computes percentiles."""

from __future__ import annotations

import statistics

Figures = dict[str, list[float]]


def render_table(figures: Figures, peer_figures: dict[str, str]) -> str:
    """Render the median and p99 of each figure, in seconds unless the title contains a unit."""
    rows = [("", "p50", "p99", "n", "Kubeflow Trainer + JobSet")]
    for title, values in figures.items():
        p50, p99 = (
            f"{statistics.median(values):.3f}",
            f"{compute_percentile(values, 99):.3f}" if len(values) > 1 else "",
        )
        rows.append((title, p50, p99, str(len(values)), peer_figures.get(title, "")))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def compute_percentile(values: list[float], percent: int) -> float:
    """Return the percentile by the nearest-rank method."""
    sorted_values = sorted(values)
    return sorted_values[max(0, -(-len(sorted_values) * percent // 100) - 1)]
