"""Renders the state of a job as HTML for notebooks: phase, progress bar, loss curve and cause of a failure."""

from collections.abc import Iterator, Sequence
from html import escape

from finetune_api.v1alpha1.job import ObjectMeta
from finetune_api.v1alpha1.status import JobStatus, Phase

BAR_WIDTH, CURVE_WIDTH, CURVE_HEIGHT = 360, 360, 90
COLORS = {Phase.COMPLETE: "#2e7d32", Phase.FAILED: "#c62828"}
DEFAULT_COLOR = "#1565c0"

LossPoint = tuple[int, float]  # optimizer step and loss


def render_job_html(metadata: ObjectMeta, status: JobStatus, losses: Sequence[LossPoint] = ()) -> str:
    """Return the HTML of a job. Text of the status is escaped, and nothing is loaded from elsewhere."""
    color = COLORS.get(status.phase, DEFAULT_COLOR) if status.phase is not None else DEFAULT_COLOR
    return "".join(
        (
            '<div style="font-family:sans-serif;font-size:13px;line-height:1.5">',
            f"<b>{escape(metadata.namespace)}/{escape(metadata.name)}</b> ",
            f'<span style="color:{color}">{escape(str(status.phase or "not processed yet"))}</span>',
            *_render_progress(status, color),
            *_render_messages(status),
            *_render_curve(losses, color),
            "</div>",
        )
    )


def _render_progress(status: JobStatus, color: str) -> Iterator[str]:
    progress, display = status.progress, status.display
    if progress is not None and progress.total_steps:
        share = min(1.0, progress.step / progress.total_steps)
        yield (
            f'<div style="width:{BAR_WIDTH}px;background:#8884;height:8px;margin:4px 0">'
            f'<div style="width:{share * BAR_WIDTH:.0f}px;background:{color};height:8px"></div></div>'
        )
    if display is not None:
        facts = (
            ("nodes", display.nodes),
            ("", display.progress),
            ("loss", display.loss),
            ("tokens/s", display.tokens_per_second),
            ("ETA", display.eta),
            ("restarts", str(status.restarts) if status.restarts else ""),
        )
        yield "<div>" + " · ".join(escape(f"{name} {value}".strip()) for name, value in facts if value) + "</div>"


def _render_messages(status: JobStatus) -> Iterator[str]:
    for condition in status.conditions:
        if condition.type == "Failed" and condition.status == "True":
            yield f"<div><b>{escape(condition.reason)}</b>: {escape(condition.message)}</div>"
    if status.waiting is not None:
        yield f"<div>waiting: {escape(status.waiting.reason)}: {escape(status.waiting.message)}</div>"
    for degradation in status.degraded:
        yield f"<div>degraded: {escape(degradation.reason)}: {escape(degradation.message)}</div>"


def _render_curve(losses: Sequence[LossPoint], color: str) -> Iterator[str]:
    if len(losses) < 2:
        return
    steps, values = zip(*losses, strict=True)
    first, last, low, high = min(steps), max(steps), min(values), max(values)
    points = " ".join(
        f"{(step - first) / max(1, last - first) * CURVE_WIDTH:.1f},"
        f"{(1 - (loss - low) / ((high - low) or 1.0)) * CURVE_HEIGHT:.1f}"
        for step, loss in losses
    )
    yield (
        f'<svg width="{CURVE_WIDTH}" height="{CURVE_HEIGHT + 4}" viewBox="0 -2 {CURVE_WIDTH} {CURVE_HEIGHT + 4}">'
        f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/></svg>'
        f"<div>loss {high:.4g} to {low:.4g}, steps {first} to {last}</div>"
    )
