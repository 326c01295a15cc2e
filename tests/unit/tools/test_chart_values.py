"""Tests of the reference of the chart's values."""

import json
from pathlib import Path

import pytest

from chart_values import render_values_reference
from helm import CHART

SCHEMA = {"properties": {"replicas": {"type": "integer"}, "image": {"properties": {"tag": {"type": "string"}}}}}


def write_chart(folder: Path, values: str) -> Path:
    (folder / "values.yaml").write_text(values)
    (folder / "values.schema.json").write_text(json.dumps(SCHEMA))
    return folder


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("replicas: 2\n", "values.yaml: replicas: write its description"),
        ("# Number.\nreplica: 2\n", "values.schema.json: replica: is missing"),
    ],
    ids=["no description", "not in the schema"],
)
def test_value_without_description_or_schema_is_an_error(values: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        render_values_reference(write_chart(tmp_path, values))


def test_reference_of_the_chart_describes_all_its_values() -> None:
    rows = [line for line in render_values_reference(CHART).splitlines() if line.startswith("| `")]

    assert len(rows) > 35
    assert len({row.split("|")[1] for row in rows}) == len(rows)
