"""Render report.html, the report of a run: a page without scripts or external resources."""

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from finetune_trainer.metrics.svg_charts import Line, draw_bars, draw_lines
from finetune_trainer.metrics.throughput import CrossRankSummary
from finetune_trainer.units import GIB

FILE_NAME = "report.html"
_PACKAGES = ("torch", "transformers", "peft", "accelerate")
_MAX_BARS = 24

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --faint: #d5dae0; --soft: #5c6670;
  --one: #0b62c4; --two: #c4490b; --bar: #7aa7dc; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e7eb; --paper: #14181c; --faint: #39414a; --soft: #98a3ad;
  --one: #6cb1ff; --two: #ffa066; --bar: #3d6ea5; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 1360px; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1rem; margin: 0 0 .3rem; }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 520px), 1fr)); gap: 1.5rem 2rem; }
figure { margin: 0; } figcaption, svg text { color: var(--soft); fill: var(--soft); font-size: 12px; }
svg { width: 100%; height: auto; } .grid { stroke: var(--faint); } .bar { fill: var(--bar); }
.limit { stroke: var(--two); stroke-width: 1.5; stroke-dasharray: 6 4; }
.line path { fill: none; stroke: var(--one); stroke-width: 1.5; } .line circle { fill: var(--one); }
.line-1 path { stroke: var(--two); } .line-1 circle { fill: var(--two); }
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
    summary: CrossRankSummary | None  # None if this attempt only published the result
    own_step_seconds: Sequence[float]  # one value per rank, see MeasuredInterval.own_step_seconds
    forecast_bytes: int | None  # forecast peak memory of a rank


def write_report(data: ReportData, folder: Path) -> None:
    """Write report.html into the folder."""
    (folder / FILE_NAME).write_text(render_report(data), encoding="utf-8")


def render_report(data: ReportData) -> str:
    """Return the page as HTML. It is also well-formed XML, so that tests can parse it."""
    title, charts = escape(data.title), "".join(_render_charts(data))
    tables = _render_table("Job", data.job) + _render_table("Environment", _describe_environment())
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"/><style>{_STYLE}</style></head>'
        f"<body><h1>{title}</h1><main>{charts}{tables}</main></body></html>\n"
    )


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
    peaks = data.summary.peak_bytes if data.summary else ()
    memory = [(f"rank {rank}", peak_bytes / GIB) for rank, peak_bytes in enumerate(peaks)]
    limit = ("forecast", data.forecast_bytes / GIB) if data.forecast_bytes else None
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


def _describe_environment() -> dict[str, str]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    environment = {"device of rank 0": device, "Python": platform.python_version()}
    if torch.version.cuda:
        environment["CUDA"] = torch.version.cuda
    versions = {name: installed for name in _PACKAGES if (installed := _find_installed_version(name))}
    return {**environment, **versions}


def _find_installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _format_value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, Mapping | list) else str(value)


def _render_table(title: str, values: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(_format_value(value))}</td></tr>" for name, value in values.items()
    )
    return f"<figure><h2>{escape(title)}</h2><table>{rows}</table></figure>"
