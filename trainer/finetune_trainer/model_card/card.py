"""Render the model card of a result from what the training recorded."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from huggingface_hub import ModelCardData

from finetune_trainer.card_marker import mark_generated
from finetune_trainer.data_sources.file_digests import FileDigest
from finetune_trainer.model_card.markdown import as_code, render_facts, render_settings, render_table
from finetune_trainer.model_card.usage_code import LoadableResult, write_usage_code
from finetune_trainer.report.attempt_history import AttemptHistory
from finetune_trainer.report.run_summary import RunSummary
from finetune_trainer.units import format_duration

_MAX_FILES = 50
_MAX_CURVE_ROWS = 12
_MAX_ATTEMPTS = 50
_CURVES = {
    "loss": "training loss",
    "eval_loss": "evaluation loss",
    "eval_rewards/accuracies": "accuracy of rewards",
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
}
_HUB_FOLDER = re.compile(r".*/([^/]+)--([^/]+)@([0-9a-f]{40})/(.*)")  # of a downloaded dataset


@dataclass(frozen=True)
class DataFacts:
    """The rows of a training or an evaluation, and the files that contain them."""

    role: str  # training or evaluation
    sources: tuple[str, ...]  # names in the spec
    counts: Mapping[str, str]
    files: tuple[FileDigest, ...]


@dataclass(frozen=True)
class CardContent:
    """Content of a model card. Texts of the spec are untrusted."""

    title: str
    result: LoadableResult
    is_base_on_hub: bool
    pipeline_tag: str | None
    tags: tuple[str, ...]
    hub_datasets: tuple[str, ...]
    description: str  # Markdown
    summary: RunSummary
    data: tuple[DataFacts, ...]
    settings: Mapping[str, str]
    log_history: Sequence[Mapping[str, Any]]
    environment: Mapping[str, str]


def render_card(content: CardContent) -> str:
    """Return the text of README.md with its metadata, which the Hub validates."""
    sections = (
        f"---\n{_build_metadata(content).to_yaml()}\n---\n",
        f"# {as_code(content.title)}\n",
        f"{content.description}\n",
        "This card contains what the training recorded. Add the intended use, the limitations and the licence. A card"
        " that somebody has edited is not replaced.\n",
        render_facts(content.summary.list_facts()),
        "The curves and the memory of each rank are in [report.html](report.html).\n",
        f"## How to use the model\n\n```python\n{write_usage_code(content.result)}```\n",
        "## Data\n",
        *map(_render_data, content.data),
        f"## Training\n\n{render_settings(content.settings)}",
        f"## Curves\n\n{render_curves(content.log_history)}",
        *_render_attempts(content.summary.history),
        f"## Hardware and software\n\n{render_facts(content.environment)}",
    )
    return mark_generated("\n".join(sections))


def _build_metadata(content: CardContent) -> ModelCardData:
    result = content.result
    on_hub = content.is_base_on_hub
    return ModelCardData(
        base_model=result.base_model if on_hub else None,
        base_model_relation=("adapter" if result.is_adapter else "finetune") if on_hub else None,
        library_name="peft" if result.is_adapter else "transformers",
        pipeline_tag=content.pipeline_tag,
        datasets=list(content.hub_datasets) or None,
        tags=list(content.tags),
    )


def _render_data(data: DataFacts) -> str:
    """Return the sources, counts and files of a training or an evaluation."""
    sources = ", ".join(map(as_code, data.sources))
    text = f"### {data.role}\n\nSources: {sources}\n\n{render_facts(data.counts)}"
    if not data.files:
        return text
    rows = ((as_code(_shorten_path(file.path)), str(file.size_bytes), f"`{file.sha256}`") for file in data.files)
    table = render_table(("file", "bytes", "sha256"), list(rows)[:_MAX_FILES])
    rest = f"\nand {len(data.files) - _MAX_FILES} more files\n" if len(data.files) > _MAX_FILES else ""
    return f"{text}\n{table}{rest}"


def _shorten_path(path: str) -> str:
    """Return the path in the repository with its commit, if the file was downloaded from the Hub."""
    match = _HUB_FOLDER.fullmatch(path)
    return f"{match[1]}/{match[2]}@{match[3]}: {match[4]}" if match else path


def render_curves(log_history: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the logged values at about twelve steps, and at the steps of at most twelve evaluations."""
    steps = _thin_out([entry["step"] for entry in log_history if "loss" in entry])
    steps |= _thin_out([entry["step"] for entry in log_history if "eval_loss" in entry])
    values: dict[int, dict[str, float]] = {step: {} for step in sorted(steps)}
    for entry in log_history:
        if entry.get("step") in values:
            values[entry["step"]] |= {key: entry[key] for key in _CURVES if key in entry}
    if not values:
        return "No step was logged.\n"
    keys = [key for key in _CURVES if any(key in row for row in values.values())]
    rows = ((str(step), *(f"{row[key]:.4g}" if key in row else "" for key in keys)) for step, row in values.items())
    return render_table(("step", *(_CURVES[key] for key in keys)), rows)


def _thin_out(steps: Sequence[int]) -> set[int]:
    """Return at most twelve steps at equal distances, with the first and the last one."""
    if len(steps) <= _MAX_CURVE_ROWS:
        return set(steps)
    return {steps[round(index * (len(steps) - 1) / (_MAX_CURVE_ROWS - 1))] for index in range(_MAX_CURVE_ROWS)}


def _render_attempts(history: AttemptHistory | None) -> Iterator[str]:
    """Yield a section about restarts and repairs, if there were any.

    Messages of errors are only in the report, because they may quote rows.
    """
    if history is None or not history.restarts:
        return
    rows = (
        (
            str(attempt.attempt),
            f"{attempt.first_step} to {attempt.last_step}",
            format_duration(attempt.duration_seconds),
            as_code(attempt.ending.cause) if attempt.ending else "published the result",
            ", ".join(as_code(f"{name}: {change}") for name, change in attempt.changed_settings.items()),
        )
        for attempt in history.attempts[-_MAX_ATTEMPTS:]
    )
    table = render_table(("attempt", "steps", "time", "end", "changed settings"), rows)
    note = "Each attempt resumed from the newest checkpoint; the effective batch stayed the same."
    yield f"## Attempts\n\n{note}\n\n{table}"
