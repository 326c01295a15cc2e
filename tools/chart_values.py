"""Render the reference of the chart's values from the comments in values.yaml and the types in values.schema.json."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

PAGE = re.compile(r"docs/([\w/-]+\.md(?:#[\w-]+)?)")
KEY = re.compile(r"( *)([A-Za-z]+):")
HEADER = """# Values of the Helm chart

Set values with `--set` or a file: `helm install -f values.yaml`. An unknown value or one of another type is an error.
[Installation](../operations/installation.md#helm) describes how to install the chart.

| value | type | default | description |
| --- | --- | --- | --- |
"""


def render_values_reference(chart: Path) -> str:
    """Return the reference as Markdown: one row for each value that has no further values below it.

    Raises: ValueError if a value has no description, or is missing in the schema
    """
    text = (chart / "values.yaml").read_text()
    values, schema = yaml.safe_load(text), json.loads((chart / "values.schema.json").read_text())
    descriptions = read_descriptions(text)
    rows = []
    for path, default, value_schema in list_values(values, schema):
        if not descriptions.get(path):
            raise ValueError(f"values.yaml: {path}: write its description as a comment above it")
        description = PAGE.sub(r"[\1](../\1)", descriptions[path])
        cells = (f"`{path}`", describe_type(value_schema), f"`{json.dumps(default)}`", description)
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n")
    return HEADER + "".join(rows)


def read_descriptions(text: str) -> dict[str, str]:
    """Return the comment above each key of values.yaml, by the path of the key."""
    descriptions: dict[str, str] = {}
    parents: list[str] = []
    comment: list[str] = []
    for line in text.splitlines():
        key = KEY.match(line)
        if line.lstrip().startswith("# "):
            comment.append(line.lstrip()[2:])
            continue
        if key:
            parents = [*parents[: len(key.group(1)) // 2], key.group(2)]
            descriptions[".".join(parents)] = " ".join(comment)
        comment = []
    return descriptions


def list_values(
    values: Mapping[str, Any], schema: Mapping[str, Any], path: str = ""
) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Yield path, default and schema of each value. Raises ValueError if the schema does not contain it."""
    for name, value in values.items():
        if name not in schema["properties"]:
            raise ValueError(f"values.schema.json: {path}{name}: is missing")
        value_schema = schema["properties"][name]
        if "properties" in value_schema:
            yield from list_values(value, value_schema, f"{path}{name}.")
        else:
            yield f"{path}{name}", value, value_schema


def describe_type(schema: Mapping[str, Any]) -> str:
    """Return the type of a value, or its permitted values."""
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = schema["type"]
    if kind == "array":
        return f"list of {describe_type(schema['items'])}"
    return kind if isinstance(kind, str) else " or ".join(kind)
