"""The table of docs/user-guide/memory.md against the forecast that it speaks of."""

import pytest

from memory_table import MARK, PAGE, compare, render_row
from testing.models.published_memory import ROWS, SOURCES, Row

_, _, WRITTEN = PAGE.read_text().partition(MARK)
TABLE = [line for line in WRITTEN.splitlines() if line.startswith("| ")][2:]  # header and rule apart
QUICK = {source: next(row for row in ROWS if row.source is source) for source in SOURCES}


def errors(rows: list[Row]) -> list[float]:
    """As they are written, in percent."""
    return [float(TABLE[ROWS.index(row)].rsplit("|", 2)[1].strip().rstrip("%")) for row in rows]


@pytest.mark.parametrize("row", QUICK.values(), ids=lambda row: f"{row.source.page}")
def test_the_forecast_is_still_what_the_table_says(row: Row) -> None:
    (compared,) = compare([row])

    assert render_row(compared) == TABLE[ROWS.index(row)]


def test_every_published_row_is_in_the_table() -> None:
    assert len(TABLE) == len(ROWS) == 92
    for row, line in zip(ROWS, TABLE, strict=True):
        assert f"| {row.model} |" in line
        assert f"| {row.batch} x {row.length}" in line


def test_nine_of_ten_forecasts_of_steady_samples_are_close() -> None:
    found = errors([row for row in ROWS if not row.varied])

    assert sum(abs(error) <= 10 for error in found) >= 0.9 * len(found)


def test_no_forecast_of_steady_samples_is_far_under() -> None:
    assert min(errors([row for row in ROWS if not row.varied])) >= -5
