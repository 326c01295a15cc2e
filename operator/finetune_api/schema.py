"""From pydantic's JSON schema to the two dialects users meet: the API server's structural schema, and an editor's."""

import json
from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]

_DROPPED = ("title", "default", "$defs")


def build_structural_schema(model: type[BaseModel]) -> Schema:
    """What a CRD may hold: no references, unions or null; a default is told in the description only.

    The API server is not asked to write defaults: they would appear in every job as fields somebody set, be owned
    by nobody in a server-side apply, and stay as they were when a later release chooses better ones.
    """
    return _structural(_inlined(model))


def build_editor_schema(model: type[BaseModel]) -> Schema:
    """Plain JSON schema (2020-12) without references; unknown fields are errors, as kubectl's strict mode has it."""
    return _plain(_inlined(model))


def _inlined(model: type[BaseModel]) -> Schema:
    schema = model.model_json_schema(by_alias=True)
    return _inline(schema, schema.get("$defs", {}))


def _inline(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    outer = {key: value for key, value in schema.items() if key not in ("anyOf", "$ref")}
    if "$ref" in schema:
        inner = definitions[schema["$ref"].rsplit("/", 1)[-1]]
    elif "anyOf" in schema and "x-kubernetes-int-or-string" not in schema:
        (inner,) = (option for option in schema["anyOf"] if option.get("type") != "null")
    else:
        return _inline_children(schema, definitions)
    merged = {**_inline(inner, definitions), **outer}
    merged["description"] = _join(schema.get("description", ""), inner, definitions)
    merged["description"] = _with_default(merged["description"], schema.get("default"))
    return {key: value for key, value in merged.items() if key not in _DROPPED}


def _inline_children(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    plain = {key: value for key, value in schema.items() if key not in _DROPPED}
    if "properties" in schema:
        plain["properties"] = {name: _inline(child, definitions) for name, child in schema["properties"].items()}
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            plain[key] = _inline(schema[key], definitions)
    if "description" in plain or "default" in schema:
        plain["description"] = _with_default(schema.get("description", ""), schema.get("default"))
    if "const" in plain:
        plain["enum"] = [plain.pop("const")]
    return plain


def _join(description: str, inner: Schema, definitions: dict[str, Schema]) -> str:
    """What the field is for, then what its type is, each once."""
    if "$ref" in inner:
        inner = definitions[inner["$ref"].rsplit("/", 1)[-1]]
    about_type: str = inner.get("description", "")
    if about_type.startswith(description.rstrip(".")):
        return about_type
    return f"{description} {about_type}".strip()


def _with_default(description: str, default: object) -> str:
    if default in (None, [], {}, "") or isinstance(default, dict) or "default" in description.lower():
        return description
    return f"{description} Default: {json.dumps(default)}.".strip()


def _structural(schema: Schema) -> Schema:
    """The API server's dialect: exclusive bounds are flags, and no additionalProperties beside properties."""
    structural = {key: value for key, value in schema.items() if key not in ("anyOf", "additionalProperties")}
    for bound in ("minimum", "maximum"):
        exclusive = "exclusive" + bound.capitalize()
        if exclusive in structural:
            structural[bound] = structural[exclusive]
            structural[exclusive] = True
    return _with_children(schema, structural, _structural)


def _plain(schema: Schema) -> Schema:
    plain = {key: value for key, value in schema.items() if not key.startswith("x-kubernetes-")}
    plain.pop("additionalProperties", None)
    if isinstance(schema.get("additionalProperties"), bool):
        plain["additionalProperties"] = schema["additionalProperties"]
    return _with_children(schema, plain, _plain)


def _with_children(schema: Schema, converted: Schema, convert: Any) -> Schema:
    if "properties" in schema:
        converted["properties"] = {name: convert(child) for name, child in schema["properties"].items()}
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            converted[key] = convert(schema[key])
    return converted
