"""Render report.html, the report of a run: a page without scripts or external resources."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetune_trainer.metrics.throughput import CrossRankSummary
from finetune_trainer.report.environment import describe_device, list_versions
from finetune_trainer.report.run_summary import RunSummary
from finetune_trainer.report.summary_section import render_summary
from finetune_trainer.report.svg_charts import Line, draw_bars, draw_lines
from finetune_trainer.units import GIB

FILE_NAME = "report.html"
_MAX_BARS = 24
# characters that XML forbids, also as escapes
_FORBIDDEN = re.compile("[^\\t\\n\\r\\x20-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")

_STYLE = r"""
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --faint: #d5dae0; --soft: #5c6670;
  --one: #0b62c4; --two: #c4490b; --bar: #7aa7dc; --useful: #2e8b57; --starting: #b8860b; --lost: #c4490b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e7eb; --paper: #14181c; --faint: #39414a; --soft: #98a3ad;
  --one: #6cb1ff; --two: #ffa066; --bar: #3d6ea5; --useful: #4fb67f; --starting: #d8ab3c; --lost: #ffa066; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 1360px; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1rem; margin: 0 0 .3rem; }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 520px), 1fr)); gap: 1.5rem 2rem; }
figure { margin: 0; } figcaption, svg text { color: var(--soft); fill: var(--soft); font-size: 12px; }
svg { width: 100%; height: auto; } .grid { stroke: var(--faint); } .bar { fill: var(--bar); }
.limit { stroke: var(--two); stroke-width: 1.5; stroke-dasharray: 6 4; }
.line path { fill: none; stroke: var(--one); stroke-width: 1.5; } .line circle { fill: var(--one); }
.line-1 path { stroke: var(--two); } .line-1 circle { fill: var(--two); }
.summary { border: 1px solid var(--faint); border-radius: 8px; padding: .8rem 1rem; margin-bottom: 1.5rem; }
.summary dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 15rem), 1fr)); gap: .6rem 1.5rem;
  margin: 0; } .summary dl div:first-child { grid-column: 1 / -1; }
dt { color: var(--soft); font-size: 12px; } dd { margin: 0; font-weight: 500; overflow-wrap: anywhere; }
.time { margin-top: .8rem; } .time svg { display: block; height: 14px; border-radius: 4px; }
.summary p { margin: .2rem 0 0; color: var(--soft); font-size: 12px; }
.attempts { margin-top: .8rem; overflow-x: auto; } .attempts table { min-width: 44rem; }
rect.part-useful { fill: var(--useful); } rect.part-starting { fill: var(--starting); }
rect.part-lost { fill: var(--lost); } .part-useful::before { color: var(--useful); }
.part-starting::before { color: var(--starting); } .part-lost::before { color: var(--lost); }
.key { margin-right: .8rem; } .key::before { content: "\25CF"; margin-right: .3rem; }
.key-0 { color: var(--one); } .key-1 { color: var(--two); }
table { border-collapse: collapse; width: 100%; } td, th { border-bottom: 1px solid var(--faint); padding: .2rem .4rem;
  text-align: left; vertical-align: top; overflow-wrap: anywhere; } th { white-space: nowrap; font-weight: 500; }
"""


@dataclass(frozen=True)
class ReportData:
    """Content of the report of a run."""

    title: str
    job: Mapping[str, Any]  # spec fields and values derived from them
    log_history: Sequence[Mapping[str, Any]]  # TrainerState.log_history: one entry per log line
    lengths: NDArray[np.int64]  # lengths of the training samples in tokens
    summary: RunSummary
    last_interval: CrossRankSummary | None  # None if this attempt only published the result
    own_step_seconds: Sequence[float]  # one value per rank, see MeasuredInterval.own_step_seconds


def write_report(data: ReportData, folder: Path) -> None:
    """Write report.html into the folder."""
    (folder / FILE_NAME).write_text(render_report(data), encoding="utf-8")


def render_report(data: ReportData) -> str:
    """Return the page as HTML. It is also well-formed XML, so that tests can parse it."""
    title, charts = escape(data.title), "".join(_render_charts(data))
    environment = {"device of rank 0": describe_device(), **list_versions()}
    tables = _render_table("Job", data.job) + _render_table("Environment", environment)
    page = (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"/><style>{_STYLE}</style></head>'
        f"<body><h1>{title}</h1>{render_summary(data.summary)}<main>{charts}{tables}</main></body></html>\n"
    )
    return _FORBIDDEN.sub("\ufffd", page)


def _render_charts(data: ReportData) -> Iterator[str]:
    def build_line(name: str, key: str) -> Line:
        return Line(name, tuple((entry["step"], entry[key]) for entry in data.log_history if key in entry))

    yield draw_lines("Loss", [build_line("training", "loss"), build_line("evaluation", "eval_loss")], x_name="step")
    yield draw_lines("Learning rate", [build_line("learning rate", "learning_rate")], x_name="step")
    yield draw_lines("Throughput", [build_line("tokens per second", "tokens_per_second")], x_name="step")
    shares = [build_line("scaling efficiency", "scaling_efficiency"), build_line("GPU utilization", "gpu_utilization")]
    if any(line.points for line in shares):  # only jobs with several ranks or GPUs
        yield draw_lines("Scaling efficiency and GPU utilization", shares, x_name="step")
    yield draw_lines("Waiting for data", [build_line("share of a step", "data_wait_share")], x_name="step")
    peaks = data.last_interval.peak_bytes if data.last_interval else ()
    memory = [(f"rank {rank}", peak_bytes / GIB) for rank, peak_bytes in enumerate(peaks)]
    forecast_bytes = data.summary.forecast_bytes
    limit = ("forecast", forecast_bytes / GIB) if forecast_bytes else None
    yield draw_bars("Peak memory per rank", memory, limit=limit, unit="GiB")
    rank_bars = [(f"rank {rank}", seconds) for rank, seconds in enumerate(data.own_step_seconds)]
    yield draw_bars("Own time of each rank", rank_bars, unit="seconds per step, without waiting for other ranks")
    yield draw_bars("Lengths of samples", _compute_histogram(data.lengths), unit="samples, by minimum length in tokens")


def _compute_histogram(lengths: NDArray[np.int64]) -> list[tuple[str, float]]:
    """Return the lower bound and the number of samples of each bin; a bin is at least one token wide."""
    low, high = int(lengths.min()), int(lengths.max())
    width = max(1, -(-(high - low + 1) // _MAX_BARS))
    counts = np.bincount((lengths - low) // width)
    return [(str(low + index * width), float(count)) for index, count in enumerate(counts)]


def _format_value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, Mapping | list) else str(value)


def _render_table(title: str, values: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(_format_value(value))}</td></tr>" for name, value in values.items()
    )
    return f"<figure><h2>{escape(title)}</h2><table>{rows}</table></figure>"
