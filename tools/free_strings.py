"""Renders where the strings of a job end that its author chooses freely, from the schema and free_strings.yaml."""

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from crd import build_crd

Schema = Mapping[str, Any]
DATA = Path(__file__).with_suffix(".yaml")
# A harmless pattern matches none of these texts.
HOSTILE_CHARACTERS = " \n\t\x1b\x7f\\'\"`$;&|<>(){}*?#%é"
FRAMES = ("{}", "a{}a", "/{}", "/a{}a", "a/{}")
HOSTILE_TEXTS = (
    *("..", "a/..", "../a", "a/../a", "/.."),
    *(frame.replace("{}", character) for frame in FRAMES for character in HOSTILE_CHARACTERS),
)
HEADER = """# Free strings of a job

The author of a job chooses these strings of `spec` freely: they have neither an enum nor a pattern that excludes what a
path, a URL, a shell or a terminal treats specially. Keys of maps and quantities without a check are free, too. In a
path, `[]` denotes the items of a list, `{}` the values of a map, `{key}` its keys, and `*` any text.

None of them becomes a path of the Kubernetes API: the names of claims and queues do, and these have the pattern of
their kind. None becomes a text for a shell: programs are started with lists of arguments. All of them are stored in the
job and in the ConfigMap of each attempt, as JSON, and `finetune` prints them with
[escapes](../user-guide/command-line.md).

| strings | where they end |
| --- | --- |
"""


def render_free_strings() -> str:
    """Return the table as Markdown. Raises: ValueError if free_strings.yaml does not match the schema."""
    if problems := find_problems(list_free_strings(get_spec_schema()), read_destinations()):
        raise ValueError("\n".join(problems))
    groups = yaml.safe_load(DATA.read_text())
    return HEADER + "".join(f"| `{'`, `'.join(each['strings'])}` | {each['ends']} |\n" for each in groups)


def read_destinations() -> list[str]:
    """Return the paths in free_strings.yaml."""
    return [path for group in yaml.safe_load(DATA.read_text()) for path in group["strings"]]


def find_problems(strings: tuple[str, ...], destinations: list[str]) -> list[str]:
    """Return a message for each string without exactly one destination, and for each destination without a string."""
    found = {string: [path for path in destinations if _matches(string, path)] for string in strings}
    problems = [
        f"{DATA.name}: {string}: state once where this free string ends; found {paths}"
        for string, paths in found.items()
        if len(paths) != 1
    ]
    unused = set(destinations) - {path for paths in found.values() for path in paths}
    return problems + [f"{DATA.name}: {path}: the schema has no such free string; remove it" for path in sorted(unused)]


def _matches(string: str, path: str) -> bool:
    return fnmatchcase(string, path.replace("[", "[[]"))


@cache
def get_spec_schema() -> Schema:
    """Return the schema of spec in the CRD."""
    schema: Schema = build_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return schema


def list_free_strings(schema: Schema) -> tuple[str, ...]:
    """Return the paths of all free strings below a schema."""
    return tuple(path for path, each in _iterate_values(schema, "") if _is_free(each))


def _iterate_values(schema: Schema, path: str) -> Iterator[tuple[str, Schema]]:
    """Yield the schema of each value by its path, and of each key of a map, which a CRD cannot restrict."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from _iterate_values(child, f"{path}.{name}".lstrip("."))
    yield from _iterate_values(schema["items"], f"{path}[]") if "items" in schema else ()
    if isinstance(values := schema.get("additionalProperties"), dict):
        yield f"{path}{{key}}", {"type": "string"}
        yield from _iterate_values(values, f"{path}{{}}")


def _is_free(schema: Schema) -> bool:
    if schema.get("type") != "string" and "x-kubernetes-int-or-string" not in schema:
        return "x-kubernetes-preserve-unknown-fields" in schema
    is_quantity = "isQuantity(self)" in str(schema.get("x-kubernetes-validations"))
    return "enum" not in schema and not is_quantity and not is_harmless(schema.get("pattern", ""))


@cache
def is_harmless(pattern: str) -> bool:
    """Return whether no string with this pattern contains a special character, or a path segment that goes up."""
    return not any(re.search(pattern, text) for text in HOSTILE_TEXTS)
