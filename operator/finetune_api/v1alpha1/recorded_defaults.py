"""Records the default values of spec fields at a job's start and applies them later, also in other releases.

Only constants are recorded. A default of None stands for a value that code computes, such as the size of /dev/shm.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError

from finetune_supervisor.contract import parse_json

M = TypeVar("M", bound=BaseModel)


@cache
def render_defaults(model_class: type[BaseModel]) -> str:
    """Return the constant defaults of all fields as compact JSON, nested like the spec and in camelCase."""
    return json.dumps(_collect_defaults(model_class), separators=(",", ":"))


def apply_defaults(model: M, recorded: str) -> M:
    """Return the model with the recorded default for each field that is unset; such a field still counts as unset.

    recorded: result of render_defaults of any release; a value that this release cannot read is ignored.
    """
    if not recorded or recorded == render_defaults(type(model)):
        return model
    try:
        values = parse_json(recorded)
    except ValueError:
        return model
    return _apply(model, values) if isinstance(values, dict) else model


def _collect_defaults(model_class: type[BaseModel]) -> dict[str, Any]:
    defaults: dict[str, Any] = {}
    for name, field in model_class.model_fields.items():
        nested_class = find_model_class(field.annotation)
        if nested_class is not None:
            value: object = _collect_defaults(nested_class)
        else:
            value = field.default if isinstance(field.default, bool | int | float | str) else None
        if value not in (None, {}):
            defaults[field.alias or name] = value
    return defaults


def find_model_class(annotation: object) -> type[BaseModel] | None:
    """Return the model class of a field that contains a model or None; None for lists and other types."""
    is_union = get_origin(annotation) in (Union, UnionType)
    candidates = get_args(annotation) if is_union else (annotation,)
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def _apply(model: M, recorded: Mapping[str, Any]) -> M:
    changes = dict(_find_changes(model, recorded))
    if not changes:
        return model
    fields_set = model.model_fields_set
    return model.model_construct(_fields_set=set(fields_set), **{**dict(model), **changes})


def _find_changes(model: BaseModel, recorded: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each field whose value differs with the recorded defaults."""
    for name, field in type(model).model_fields.items():
        value, default = getattr(model, name), recorded.get(field.alias or name)
        if isinstance(value, BaseModel):
            changed = _apply(value, default) if isinstance(default, dict) else value
            if changed is not value:
                yield name, changed
        elif default is not None and name not in model.model_fields_set and default != value:
            annotation: Any = field.annotation
            try:
                yield name, TypeAdapter(annotation).validate_python(default)
            except ValidationError:
                continue
