"""Compare the table of docs/user-guide/memory.md with the current forecasts."""

import pytest

from memory_table import MARK, PAGE, compare_rows, render_row
from testing.models.published_memory import ROWS, SOURCES, PublishedRow

_, _, GENERATED = PAGE.read_text().partition(MARK)
TABLE = [line for line in GENERATED.splitlines() if line.startswith("| ")][2:]  # skip the header and separator lines
FIRST_ROWS = {source: next(row for row in ROWS if row.source is source) for source in SOURCES}


def read_table_errors(rows: list[PublishedRow]) -> list[float]:
    """Return the forecast errors of the given rows in percent, as listed in the table."""
    return [float(TABLE[ROWS.index(row)].rsplit("|", 2)[1].strip().rstrip("%")) for row in rows]


@pytest.mark.parametrize("row", FIRST_ROWS.values(), ids=lambda row: f"{row.source.page}")
def test_table_contains_the_current_forecast(row: PublishedRow) -> None:
    (comparison,) = compare_rows([row])

    assert render_row(comparison) == TABLE[ROWS.index(row)]


def test_every_published_row_is_in_the_table() -> None:
    assert len(TABLE) == len(ROWS) == 92
    for row, line in zip(ROWS, TABLE, strict=True):
        assert f"| {row.model} |" in line
        assert f"| {row.batch_size} x {row.length}" in line


def test_90_percent_of_fixed_length_forecasts_are_within_10_percent() -> None:
    errors = read_table_errors([row for row in ROWS if not row.has_varied_lengths])

    assert sum(abs(error) <= 10 for error in errors) >= 0.9 * len(errors)


def test_no_fixed_length_forecast_is_more_than_5_percent_too_low() -> None:
    assert min(read_table_errors([row for row in ROWS if not row.has_varied_lengths])) >= -5
