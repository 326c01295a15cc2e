"""Render the summary with which report.html opens: facts, use of the GPU time, and what ended earlier attempts."""

from html import escape

from finetune_trainer.report.attempt_history import AttemptHistory, PastAttempt
from finetune_trainer.report.run_summary import RunSummary, format_hours, list_parts
from finetune_trainer.units import format_duration

_BAR_WIDTH, _BAR_HEIGHT = 1000, 14  # of the viewBox, which is stretched to the page
_MAX_ROWS = 50
_COLUMNS = ("Attempt", "Steps", "Time", "End", "Changed settings")


def render_summary(summary: RunSummary) -> str:
    """Return the summary as an HTML section."""
    facts = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in summary.list_facts().items()
        if name != summary.hours_unit  # which the bar contains
    )
    history = summary.history
    details = _render_time_bar(history, summary.hours_unit) + _render_attempts(history) if history else ""
    return f'<section class="summary"><dl>{facts}</dl>{details}</section>'


def _render_time_bar(history: AttemptHistory, unit: str) -> str:
    """Return a bar that is divided in proportion to useful, starting and lost time, and its legend."""
    total = history.time.total
    if total <= 0:
        return ""
    rectangles, left = [], 0.0
    for name, seconds in list_parts(history.time):
        width = seconds / total * _BAR_WIDTH
        label = f"{name}: {format_hours(seconds)} {unit} ({seconds / total:.0%})"
        rectangles.append(
            f'<rect class="part-{name}" x="{left:.2f}" y="0" width="{width:.2f}" height="{_BAR_HEIGHT}">'
            f"<title>{escape(label)}</title></rect>"
        )
        left += width
    legend = " ".join(
        f'<span class="key part-{name}">{name} {escape(format_hours(seconds))} ({seconds / total:.0%})</span>'
        for name, seconds in list_parts(history.time)
    )
    return (
        f'<div class="time"><svg viewBox="0 0 {_BAR_WIDTH} {_BAR_HEIGHT}" preserveAspectRatio="none" role="img"'
        f' xmlns="http://www.w3.org/2000/svg" aria-label="{escape(unit)} by use">{"".join(rectangles)}</svg>'
        f"<p>{escape(format_hours(total))} {escape(unit)}: {legend}</p></div>"
    )


def _render_attempts(history: AttemptHistory) -> str:
    """Return a table of the attempts, if there is more than one."""
    if not history.restarts:
        return ""
    attempts = history.attempts[-_MAX_ROWS:]
    columns = _COLUMNS if any(attempt.changed_settings for attempt in attempts) else _COLUMNS[:-1]
    rows = "".join(_render_attempt(attempt, column_count=len(columns)) for attempt in attempts)
    unrecorded = history.restarts + 1 - len(history.attempts)
    notes = [f"{unrecorded} attempt(s) ended before they recorded anything"] if unrecorded else []
    notes += [f"the last {_MAX_ROWS} attempts"] if len(history.attempts) > _MAX_ROWS else []
    caption = f"<p>{escape('; '.join(notes))}</p>" if notes else ""
    header = "".join(f"<th>{name}</th>" for name in columns)
    table = f"<table><thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="attempts">{table}</div>{caption}'


def _render_attempt(attempt: PastAttempt, *, column_count: int) -> str:
    ending = attempt.ending
    end = escape(ending.cause) if ending else "published the result"
    if ending and ending.message:
        end += f"<br/>{escape(ending.message)}"
    cells = (
        str(attempt.attempt),
        f"{attempt.first_step} to {attempt.last_step}",
        escape(format_duration(attempt.duration_seconds)),
        end,
        "<br/>".join(escape(f"{name}: {change}") for name, change in attempt.changed_settings.items()),
    )
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells[:column_count]) + "</tr>"
