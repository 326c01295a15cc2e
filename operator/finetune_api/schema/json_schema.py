"""From pydantic's JSON schema to the dialects users meet: the API server's structural schema, and an editor's."""

from collections.abc import Callable, Iterator
from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]


def inline_schema(model: type[BaseModel]) -> Schema:
    """The model's schema as one tree: no references, no unions with null, no titles."""
    schema = model.model_json_schema(by_alias=True)
    return _inline(schema, schema.get("$defs", {}))


def build_structural_schema(model: type[BaseModel], *, tell_defaults: bool) -> Schema:
    """What a CRD may hold. A default is at most told in the description.

    The API server is not asked to write defaults: they would appear in every job as fields somebody set, be owned
    by nobody in a server-side apply, and stay as they were when a later release chooses better ones.
    """
    return _structural(inline_schema(model), tell_defaults)


def build_editor_schema(model: type[BaseModel]) -> Schema:
    """Plain JSON schema (2020-12); unknown fields are errors, as in kubectl's strict mode."""
    return _plain(inline_schema(model))


def fields(schema: Schema, prefix: str = "") -> Iterator[tuple[str, Schema, bool]]:
    """Depth first: each field's path as a user would say it, its schema, and whether it is required."""
    for name, field in schema.get("properties", {}).items():
        path = prefix + name
        yield path, field, name in schema.get("required", ())
        yield from fields(field, f"{path}.")
        yield from fields(field.get("items", {}), f"{path}[].")


def text_of_default(schema: Schema) -> str:
    """The default as a user would write it, or nothing."""
    default = schema.get("default")
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, list):
        return f"[{', '.join(default)}]"
    return "" if default is None else str(default)


def _inline(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    own = {key: value for key, value in schema.items() if key not in ("$ref", "$defs", "title")}
    if own.get("default") in (None, [], {}, "") or isinstance(own.get("default"), dict):
        own.pop("default", None)
    if "const" in own:  # a choice of one; a CRD knows only choices
        own["enum"] = [own.pop("const")]
    if "x-kubernetes-int-or-string" in own:
        own["type"] = [option["type"] for option in own.pop("anyOf")]
    (inner,) = [option for option in own.pop("anyOf", [{}]) if option.get("type") != "null"]
    if reference := inner.get("$ref") or schema.get("$ref"):
        inner = definitions[reference.rsplit("/", 1)[-1]]
    if inner:
        return {**_inline(inner, definitions), **own, "description": _join(own, inner)}
    return _with_children(own, own, lambda child: _inline(child, definitions))


def _join(field: Schema, of_type: Schema) -> str:
    """What the field is for, then what its type is, once where one begins with the other."""
    description, about_type = field.get("description", ""), of_type.get("description", "")
    return about_type if about_type.startswith(description.rstrip(".")) else f"{description} {about_type}".strip()


def _structural(schema: Schema, tell_defaults: bool) -> Schema:
    """The API server's dialect: exclusive bounds are flags, and no additionalProperties beside properties."""
    structural = {key: value for key, value in schema.items() if key not in ("default", "additionalProperties")}
    if tell_defaults and (default := text_of_default(schema)):
        structural["description"] = f"{schema['description']} Default: {default}."
    for bound in ("minimum", "maximum"):
        exclusive = "exclusive" + bound.capitalize()
        if exclusive in structural:
            structural[bound] = structural[exclusive]
            structural[exclusive] = True
    if "x-kubernetes-int-or-string" in structural:
        del structural["type"]
    return _with_children(schema, structural, lambda child: _structural(child, tell_defaults))


def _plain(schema: Schema) -> Schema:
    plain = {key: value for key, value in schema.items() if not key.startswith("x-kubernetes-")}
    return _with_children(schema, plain, _plain)


def _with_children(schema: Schema, converted: Schema, convert: Callable[[Schema], Schema]) -> Schema:
    """`converted` with the children of `schema` converted too, keys in the order in which people ask."""
    if "properties" in schema:
        converted["properties"] = {name: convert(child) for name, child in schema["properties"].items()}
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            converted[key] = convert(schema[key])
    return dict(sorted(converted.items(), key=_reading_order))


def _reading_order(item: tuple[str, object]) -> int:
    order = ("description", "type", "other", "required", "properties", "items")
    return order.index(item[0] if item[0] in order else "other")
