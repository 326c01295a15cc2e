"""report.html: a run on one page that needs no network, no script and no other file."""

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

from finetune_trainer.data.token_dataset import Numbers
from finetune_trainer.memory.gpus import GIB
from finetune_trainer.metrics.cross_rank import Summary
from finetune_trainer.metrics.svg_charts import Line, draw_bars, draw_lines

FILE_NAME = "report.html"
_PACKAGES = ("torch", "transformers", "peft", "accelerate")
_MOST_BARS = 24

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
class Run:
    """All that the page shows."""

    title: str
    job: Mapping[str, Any]  # what was asked for and what was made of it
    history: Sequence[Mapping[str, Any]]  # of transformers: an entry per log line
    lengths: Numbers  # of the samples trained on, in tokens
    measured: Summary | None  # None: this attempt found nothing left to train
    own_seconds: Sequence[float]  # per step, by rank
    expected_memory: int | None


def write_report(run: Run, folder: Path) -> None:
    (folder / FILE_NAME).write_text(render(run), encoding="utf-8")


def render(run: Run) -> str:
    """Well-formed XML too, so that any parser reads it."""
    title, charts = escape(run.title), "".join(_charts(run))
    tables = _table("Job", run.job) + _table("Environment", _environment())
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"/><style>{_STYLE}</style></head>'
        f"<body><h1>{title}</h1><main>{charts}{tables}</main></body></html>\n"
    )


def _charts(run: Run) -> Iterator[str]:
    def line(name: str, key: str) -> Line:
        return Line(name, tuple((entry["step"], entry[key]) for entry in run.history if key in entry))

    yield draw_lines("Loss", [line("training", "loss"), line("evaluation", "eval_loss")], x_name="step")
    yield draw_lines("Learning rate", [line("learning rate", "learning_rate")], x_name="step")
    yield draw_lines("Throughput", [line("tokens per second", "tokens_per_second")], x_name="step")
    yield draw_lines("Waiting for data", [line("share of a step", "data_wait_share")], x_name="step")
    peaks = run.measured.peaks if run.measured else ()
    memory = [(f"rank {rank}", peak / GIB) for rank, peak in enumerate(peaks)]
    limit = ("forecast", run.expected_memory / GIB) if run.expected_memory else None
    yield draw_bars("Peak memory per rank", memory, limit=limit, unit="GiB")
    own = [(f"rank {rank}", seconds) for rank, seconds in enumerate(run.own_seconds)]
    yield draw_bars("Own time of each rank", own, unit="seconds of a step in which it waits for no other")
    yield draw_bars("Lengths of samples", _histogram(run.lengths), unit="samples, by their tokens from")


def _histogram(lengths: Numbers) -> list[tuple[str, float]]:
    """Of whole numbers, so a bar is never narrower than one token."""
    low, high = int(lengths.min()), int(lengths.max())
    width = max(1, -(-(high - low + 1) // _MOST_BARS))
    counts = np.bincount((lengths - low) // width)
    return [(str(low + number * width), float(count)) for number, count in enumerate(counts)]


def _environment() -> dict[str, str]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    found = {"device of rank 0": device, "Python": platform.python_version()}
    if torch.version.cuda:
        found["CUDA"] = torch.version.cuda
    return {**found, **{name: said for name in _PACKAGES if (said := _version(name))}}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _readable(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, Mapping | list) else str(value)


def _table(title: str, facts: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(_readable(value))}</td></tr>" for name, value in facts.items()
    )
    return f"<figure><h2>{escape(title)}</h2><table>{rows}</table></figure>"
