"""Forecast every job of testing/models/published_memory.py and write the table of docs/user-guide/memory.md.

`--check` only compares.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from generate import ROOT, replace
from testing.models.published_memory import ROWS, UNITS, Row, forecast_row

PAGE = ROOT / "docs/user-guide/memory.md"
MARK = (
    "<!-- Everything below is written by tools/memory_table.py; change testing/models/published_memory.py and run it."
    " -->\n"
)
CLOSE, UNDER = 0.10, 0.05
_MANY_LENGTHS = " \\*"


@dataclass(frozen=True)
class Compared:
    """A published row beside its forecast."""

    row: Row
    forecast: int

    @property
    def error(self) -> float:
        return self.forecast / self.row.published_bytes - 1


def main() -> int:
    """Exit code 1 if --check found a table that is out of date. It takes minutes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the table is out of date")
    check = parser.parse_args().check
    head, mark, _ = PAGE.read_text().partition(MARK)
    stale = replace(PAGE, head + mark + render(compare(ROWS)), check=check)
    return 1 if check and stale else 0


def compare(rows: Iterable[Row]) -> tuple[Compared, ...]:
    return tuple(Compared(row, forecast_row(row)) for row in rows)


def render(compared: Sequence[Compared]) -> str:
    spread = [each for each in compared if each.row.way is not None]
    steady = [each for each in compared if not each.row.varied]
    return "\n".join(
        [
            "",
            f"- All rows: {summarise(compared)}.",
            f"- Rows whose samples are as long as the table says (not marked \\*): {summarise(steady)}.",
            f"- Rows of memory that is spread (zero2, zero3): {summarise(spread)}.",
            "",
            "| source | model | method | batch x length | published | forecast | error |",
            "| --- | --- | --- | --- | ---: | ---: | ---: |",
            *map(render_row, compared),
            "",
        ]
    )


def summarise(compared: Sequence[Compared]) -> str:
    close = sum(abs(each.error) <= CLOSE for each in compared)
    under = sum(each.error < -UNDER for each in compared)
    return (
        f"{close} of {len(compared)} ({close / len(compared):.0%}) within {CLOSE:.0%}, {under} more than {UNDER:.0%}"
        f" under; errors from {min(each.error for each in compared):+.1%} to"
        f" {max(each.error for each in compared):+.1%}"
    )


def render_row(compared: Compared) -> str:
    row = compared.row
    unit = row.source.unit
    digits = 0 if UNITS[unit] == "MiB" else 2
    cells = (
        row.source.name.rpartition("/")[2],
        row.model,
        describe_method(row),
        f"{row.batch} x {row.length}{_MANY_LENGTHS if row.varied else ''}",
        f"{row.published:.{digits}f} {UNITS[unit]}",
        f"{compared.forecast / unit:.{digits}f} {UNITS[unit]}",
        f"{compared.error:+.1%}",
    )
    return f"| {' | '.join(cells)} |"


def describe_method(row: Row) -> str:
    how = "full" if row.lora is None else f"lora r={row.lora.r} {', '.join(row.lora.target_modules)}"
    if row.way is not None:
        how = f"{how}; zero{row.way.stage} on {row.ranks}"
    return how if row.checkpointing else f"{how}; no checkpointing"


if __name__ == "__main__":
    sys.exit(main())
