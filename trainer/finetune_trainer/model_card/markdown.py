"""Render untrusted values, such as names of datasets, as Markdown that contains no other markup."""

import re
from collections.abc import Iterable, Mapping, Sequence

_MAX_CHARACTERS = 300
_MARKUP = re.compile(r"[\\`*_{}\[\]<>|&~#@!$]|:(?=//)|(?<=www)\.")
_NOT_PRINTABLE = re.compile(r"[\s\x00-\x1f\x7f-\x9f\u2028\u2029]+")


def as_text(value: object) -> str:
    """Return the text of the value with a backslash before each character that has a meaning; usable in a table."""
    return _MARKUP.sub(r"\\\g<0>", _as_line(value))


def as_code(value: object) -> str:
    """Return the text of the value as a code span, in which Markdown and HTML have no meaning; usable in a table."""
    text = _as_line(value)
    fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    padding = " " if text.startswith("`") or text.endswith("`") else ""
    # A table ends a cell at each pipe that has no backslash, even in a code span.
    return f"{fence}{padding}{text}{padding}{fence}".replace("|", "\\|")


def _as_line(value: object) -> str:
    """Return the text of the value on one line of limited length."""
    text = _NOT_PRINTABLE.sub(" ", str(value)).strip()
    return (f"{text[:_MAX_CHARACTERS]}..." if len(text) > _MAX_CHARACTERS else text) or "(empty)"


def render_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; the cells are Markdown."""
    lines = (header, ["---"] * len(header), *rows)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def render_facts(facts: Mapping[str, str]) -> str:
    """Return a table of names and untrusted values."""
    return render_table(("", ""), ((name, as_text(value)) for name, value in facts.items()))


def render_settings(settings: Mapping[str, str]) -> str:
    """Return a table of the names of settings and their untrusted values, as code."""
    return render_table(("setting", "value"), ((name, as_code(value)) for name, value in settings.items()))
