"""Converts pydantic's JSON schema to the structural schema of a CRD and to a schema for editors."""

from collections.abc import Callable, Iterator
from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]


def inline_schema(model: type[BaseModel]) -> Schema:
    """Return the model's JSON schema with references inlined, and titles and null unions removed."""
    schema = model.model_json_schema(by_alias=True)
    return _inline_references(schema, schema.get("$defs", {}))


def build_structural_schema(model: type[BaseModel], *, describe_defaults: bool) -> Schema:
    """Return the structural schema for a CRD, with defaults only in the descriptions.

    The API server must not write defaults into objects: they would look as if a user had set them, have no field owner
    in server-side apply, and keep old values when a later release changes a default.
    """
    return _convert_to_structural(inline_schema(model), describe_defaults)


def build_editor_schema(model: type[BaseModel]) -> Schema:
    """Return a plain JSON schema (2020-12) in which unknown fields are errors, as in kubectl's strict mode."""
    return _remove_kubernetes_keywords(inline_schema(model))


def iterate_fields(schema: Schema, prefix: str = "") -> Iterator[tuple[str, Schema, bool]]:
    """Yield (path, schema, is_required) for each field, depth first; `path[]` denotes the items of a list."""
    for name, field in schema.get("properties", {}).items():
        path = prefix + name
        yield path, field, name in schema.get("required", ())
        yield from iterate_fields(field, f"{path}.")
        yield from iterate_fields(field.get("items", {}), f"{path}[].")


def format_default(schema: Schema) -> str:
    """Return the default value in YAML notation, or an empty string."""
    default = schema.get("default")
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, list):
        return f"[{', '.join(default)}]"
    return "" if default is None else str(default)


def _inline_references(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    keywords = {key: value for key, value in schema.items() if key not in ("$ref", "$defs", "title")}
    if keywords.get("default") in (None, [], {}, "") or isinstance(keywords.get("default"), dict):
        keywords.pop("default", None)
    if "const" in keywords:  # structural schemas have no const
        keywords["enum"] = [keywords.pop("const")]
    if "x-kubernetes-int-or-string" in keywords and "anyOf" in keywords:
        keywords["type"] = [option["type"] for option in keywords.pop("anyOf")]
    (inner_schema,) = [option for option in keywords.pop("anyOf", [{}]) if option.get("type") != "null"]
    if reference := inner_schema.get("$ref") or schema.get("$ref"):
        inner_schema = definitions[reference.rsplit("/", 1)[-1]]
    if inner_schema:
        return {
            **_inline_references(inner_schema, definitions),
            **keywords,
            "description": _join_descriptions(keywords, inner_schema),
        }
    return _convert_children(keywords, keywords, lambda child: _inline_references(child, definitions))


def _join_descriptions(field_schema: Schema, type_schema: Schema) -> str:
    """Join the descriptions of a field and its type, without repeating a common prefix."""
    description, type_description = field_schema.get("description", ""), type_schema.get("description", "")
    return (
        type_description
        if type_description.startswith(description.rstrip("."))
        else f"{description} {type_description}".strip()
    )


def _convert_to_structural(schema: Schema, describe_defaults: bool) -> Schema:
    """Convert to a structural schema: exclusive bounds become booleans, and additionalProperties is removed."""
    structural_schema = {key: value for key, value in schema.items() if key not in ("default", "additionalProperties")}
    if describe_defaults and (default := format_default(schema)):
        structural_schema["description"] = f"{schema['description']} Default: {default}."
    for bound_name in ("minimum", "maximum"):
        exclusive = "exclusive" + bound_name.capitalize()
        if exclusive in structural_schema:
            structural_schema[bound_name] = structural_schema[exclusive]
            structural_schema[exclusive] = True
    if "x-kubernetes-int-or-string" in structural_schema:
        del structural_schema["type"]
    return _convert_children(schema, structural_schema, lambda child: _convert_to_structural(child, describe_defaults))


def _remove_kubernetes_keywords(schema: Schema) -> Schema:
    plain_schema = {key: value for key, value in schema.items() if not key.startswith("x-kubernetes-")}
    return _convert_children(schema, plain_schema, _remove_kubernetes_keywords)


def _convert_children(schema: Schema, converted_schema: Schema, convert: Callable[[Schema], Schema]) -> Schema:
    """Add the converted children of `schema` to `converted_schema`, and return it with sorted keys."""
    if "properties" in schema:
        converted_schema["properties"] = {name: convert(child) for name, child in schema["properties"].items()}
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            converted_schema[key] = convert(schema[key])
    return dict(sorted(converted_schema.items(), key=_get_key_position))


def _get_key_position(item: tuple[str, object]) -> int:
    order = ("description", "type", "other", "required", "properties", "items")
    return order.index(item[0] if item[0] in order else "other")
