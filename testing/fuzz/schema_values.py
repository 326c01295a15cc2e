"""Random values that a JSON schema permits, for CRD schemas and for those that pydantic derives from its models."""

import random
import re
from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]

OPTIONAL_PROBABILITY = 0.4
MAX_DEPTH = 8
MAX_EXTRA_ITEMS = 3  # more than `minItems`; the largest list that the schema permits is rare
LARGE_LIST_PROBABILITY = 0.02
MAX_LIST_ITEMS = 64
MAX_TEXT_CHARACTERS = 5000
INT64 = 2**63 - 1

TIMES = ("1970-01-01T00:00:00Z", "2026-01-01T12:00:30Z", "2026-01-01T11:59:00.5Z", "9999-12-31T23:59:59Z")
WORDS = (
    "a", "data", "/data", "/data/x", "acme/model", "auto", "1", "0", "-1", "1.5", "500m", "1Gi", "10%", "true",
    "Always", "nvidia.com/gpu", "x_1", "A.b-c", "registry.example/trainer:v1", "a=b", "\u4e2d\u6587", "\x00", "../..",
    "x" * 300,
)  # fmt: skip
NUMBERS = (0, 1, 2, 3, 7, 8, 60, 137, 1000, 2**31 - 1, 2**53, INT64, -1, -INT64)


def generate_value(schema: Schema, source: random.Random, *, root: Schema | None = None, depth: int = 0) -> Any:
    """Return a value that the schema permits; patterns, exclusive bounds and cross-field rules may be violated.

    root: the schema that contains the definitions of `$ref`. The keyword `examples` gives likely strings.
    """
    root = schema if root is None else root
    if "$ref" in schema:
        return generate_value(_resolve(root, schema["$ref"]), source, root=root, depth=depth)
    if variants := schema.get("anyOf") or schema.get("oneOf"):
        variant = {**schema, "anyOf": (), "oneOf": (), **source.choice(variants)}
        return generate_value(variant, source, root=root, depth=depth)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return source.choice(schema["enum"])
    if schema.get("type") == "object":
        return _generate_object(schema, source, root=root, depth=depth + 1)
    if schema.get("type") == "array":
        return _generate_list(schema, source, root=root, depth=depth + 1)
    return _generate_scalar(schema, source)


def _generate_scalar(schema: Schema, source: random.Random) -> str | float | bool | None:
    match schema.get("type"):
        case "string":
            return _generate_text(schema, source)
        case "integer":
            return source.choice(_list_integers(schema))
        case "number":
            return _generate_number(schema, source)
        case "boolean":
            return source.random() < 0.5
        case "null":
            return None
    return source.choice((source.choice(WORDS), source.choice(NUMBERS)))  # int-or-string, or any value


def _resolve(root: Schema, reference: str) -> Schema:
    found: Any = root
    for part in reference.removeprefix("#/").split("/"):
        found = found[part]
    resolved: Schema = found
    return resolved


def _generate_object(schema: Schema, source: random.Random, *, root: Schema, depth: int) -> dict[str, Any]:
    required = schema.get("required", ())
    names = [
        name
        for name in schema.get("properties", ())
        if name in required or (depth < MAX_DEPTH and source.random() < OPTIONAL_PROBABILITY)
    ]
    value = {name: generate_value(schema["properties"][name], source, root=root, depth=depth) for name in names}
    values_schema = schema.get("additionalProperties")
    if isinstance(values_schema, Mapping):
        for _ in range(source.randrange(MAX_EXTRA_ITEMS)):
            value[source.choice(WORDS)] = generate_value(values_schema, source, root=root, depth=depth)
    return value


def _generate_list(schema: Schema, source: random.Random, *, root: Schema, depth: int) -> list[Any]:
    largest = min(schema.get("maxItems", MAX_LIST_ITEMS), MAX_LIST_ITEMS)
    smallest = schema.get("minItems", 0)
    length = source.randint(smallest, max(smallest, min(largest, smallest + MAX_EXTRA_ITEMS)))
    if source.random() < LARGE_LIST_PROBABILITY:
        length = largest
    return [generate_value(schema.get("items", {}), source, root=root, depth=depth) for _ in range(length)]


def _generate_text(schema: Schema, source: random.Random) -> str:
    if schema.get("format") == "date-time":
        return source.choice(TIMES)
    examples = schema.get("examples", ())
    if examples and source.random() < 0.8:
        return str(source.choice(examples))
    longest: int = min(schema.get("maxLength", MAX_TEXT_CHARACTERS), MAX_TEXT_CHARACTERS)
    candidates: list[str] = [*WORDS, "", "y" * longest, "\u00e9" * longest]
    if pattern := schema.get("pattern"):
        candidates = [text for text in candidates if re.search(pattern, text)] or candidates
    shortest: int = schema.get("minLength", 0)
    return source.choice(candidates)[:longest].ljust(shortest, "z")


def _get_bounds(schema: Schema) -> tuple[float, float]:
    """Return the smallest and largest number, which `exclusiveMinimum` and `exclusiveMaximum` exclude."""
    return schema.get("minimum", -INT64), schema.get("maximum", INT64)


def _list_integers(schema: Schema) -> list[int]:
    """Return the bounds and the usual numbers between them."""
    lowest, highest = _get_bounds(schema)
    between = [number for number in NUMBERS if lowest <= number <= highest]
    return [*between, int(lowest), int(highest)]


def _generate_number(schema: Schema, source: random.Random) -> float:
    lowest, highest = _get_bounds(schema)
    return source.choice(
        (float(source.choice(_list_integers(schema))), lowest, highest, source.uniform(lowest, highest))
    )
