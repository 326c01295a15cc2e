"""Renders a conversion as YAML, as a list of differences, or as JSON."""

import textwrap

from finetune_api import visible_text
from finetune_api.yaml_documents import dump_yaml
from finetune_convert.conversion import REPORTED, Conversion, Entry, EntryEffect

WIDTH = 110
FLOW_WIDTH = 84  # a flow mapping is broken after the item that passes this column, so that lines have at most 120
TITLES = {
    EntryEffect.EDIT: "check or edit",
    EntryEffect.CHANGED: "not taken over, the training differs",
    EntryEffect.UNKNOWN: "unknown options",
    EntryEffect.SECRET: "secrets, which are not copied",
    EntryEffect.MAPPED: "taken over with another value or form",
    EntryEffect.DEFAULT: "defaults of the tool, stated in the job",
    EntryEffect.UNUSED: "not taken over, no effect on the result",
    EntryEffect.SAME: "need no field",
    EntryEffect.NOTE: "notes",
}


def render_yaml(conversion: Conversion) -> str:
    """Return the job as YAML, with what the user has to edit as comments above it."""
    lines = [f"Converted by finetune convert from {conversion.source}."]
    for title, effects in (
        ("Check or edit:", (EntryEffect.EDIT, EntryEffect.SECRET)),
        ("Not taken over, the training differs:", (EntryEffect.CHANGED, EntryEffect.UNKNOWN)),
    ):
        entries = conversion.select(*effects)
        lines += [title, *(f"- {_describe(entry)}" for entry in entries)] if entries else []
    comments = [
        f"# {wrapped}"
        for line in lines
        for wrapped in textwrap.wrap(line, WIDTH - 2, subsequent_indent="  ", break_long_words=False)
    ]
    job = dump_yaml(conversion.job, default_flow_style=None, width=FLOW_WIDTH)
    return "\n".join(comments) + "\n" + job


def render_summary(conversion: Conversion) -> str:
    """Return all entries but those that were taken over unchanged, grouped by their effect."""
    taken = len(conversion.select(EntryEffect.TAKEN))
    lines = [f"{conversion.source}: {taken} taken over unchanged"]
    for effect, title in TITLES.items():
        entries = conversion.select(effect)
        if entries:
            lines += [f"{title} ({len(entries)})", *(f"  {_describe(entry)}" for entry in entries)]
    return "\n".join(lines)


def render_json(conversion: Conversion) -> str:
    """Return job and entries as JSON."""
    entries = [
        {
            "option": entry.option,
            "effect": entry.effect,
            "field": entry.field and f"spec.{entry.field}",
            "line": entry.line,
            "message": entry.message,
        }
        for entry in conversion.entries
    ]
    content = {"source": conversion.source, "job": conversion.job, "entries": entries}
    return visible_text.render_json(content, indent=1)


def _describe(entry: Entry) -> str:
    """Return an entry as one line with control characters as escapes."""
    return visible_text.escape_controls(" ".join(str(entry).split()))


assert set(TITLES) == set(REPORTED)  # every effect has a title
