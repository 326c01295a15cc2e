"""Turns pydantic's errors into messages for users: field, expected value, value found, and likely field names."""

import json
import re
from difflib import get_close_matches
from functools import cache
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from finetune_api.schema.json_schema import Schema, inline_schema, iterate_fields
from finetune_api.v1alpha1.job import FineTuneJobSpec

Location = tuple[int | str, ...]

JOB_FIELDS = ("apiVersion", "kind", "metadata", "spec", "status")
_SIMILARITY = 0.7  # cutoff of difflib: loraa suggests lora and nodes suggests numNodes, method does not suggest model
_MAX_QUOTED_LENGTH = 40  # characters
# names of pydantic's types for users of YAML
_TYPES = {
    "bool": "true or false",
    "dict": "an object",
    "float": "a number",
    "int": "an integer",
    "model": "an object",
    "string": "a string",
    "tuple": "a list",
}
_SHOULD = re.compile(r"^\w+ should ")
_TYPE_ERRORS = ("type", "parsing", "from_float", "attributes_type")


def explain_validation_error(error: ValidationError, *, within: str = "") -> str:
    """Return all problems in one line, such as `spec.numNodes: ...; spec.model: ...`."""
    return "; ".join(explain_each_field(error, within=within))


def explain_each_field(error: ValidationError, *, within: str = "") -> tuple[str, ...]:
    """Return one line per invalid field; `within` is the validated field of the job, empty for a whole job."""
    problems = error.errors(include_url=False, include_context=False)
    parents = {problem["loc"][:depth] for problem in problems for depth in range(len(problem["loc"]))}
    by_field: dict[Location, list[ErrorDetails]] = {}
    for problem in problems:
        # pydantic does not count invalid items, so a list of them also seems too short
        if not (problem["type"] == "too_short" and problem["loc"] in parents):
            by_field.setdefault(
                _without_union_member((within, *problem["loc"]) if within else problem["loc"]), []
            ).append(problem)
    return tuple(f"{_format_path(field)}: {_explain_problems(field, each)}" for field, each in by_field.items())


def explain_unknown_field(field: Location) -> str:
    """Return `unknown field` with a suggestion: a similar field of the same object, or the only one of that name."""
    parent, name = field[:-1], _fold(str(field[-1]))
    siblings = {
        _fold(known): _format_path((*parent, known)) for known in _schemas_along(parent)[-1].get("properties", ())
    }
    similar = [name] if name in siblings else get_close_matches(name, siblings, n=2, cutoff=_SIMILARITY)
    elsewhere = [path for path, _, _ in iterate_fields(_job_schema()) if _fold(path.rpartition(".")[2]) == name]
    suggestions = [siblings[each] for each in similar] or (elsewhere if len(elsewhere) == 1 else [])
    return f"unknown field; did you mean {' or '.join(suggestions)}?" if suggestions else "unknown field"


@cache
def _job_schema() -> Schema:
    return {"properties": {**{field: {} for field in JOB_FIELDS}, "spec": inline_schema(FineTuneJobSpec)}}


def _schemas_along(location: Location) -> list[Schema]:
    """Return the schemas of the job and of each part of `location`; an empty one for an unknown field."""
    schemas = [_job_schema()]
    for part in location:
        children = schemas[-1].get("items" if isinstance(part, int) else "properties", {})
        child = children if isinstance(part, int) else children.get(part, schemas[-1].get("additionalProperties"))
        schemas.append(child if isinstance(child, dict) else {})
    return schemas


def _without_union_member(location: Location) -> Location:
    """Return the location without the union member that pydantic appends, which is not a field."""
    for depth, schema in enumerate(_schemas_along(location)):
        if "x-kubernetes-int-or-string" in schema:  # the only unions in the schema
            return location[:depth]
    return location


def _format_path(field: Location) -> str:
    """Return the path in kubectl's notation, such as `spec.dataset.train[0].name`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in field).removeprefix(".")


def _explain_problems(field: Location, problems: list[ErrorDetails]) -> str:
    """Explain the problems of one field; there are several only if it is a union."""
    problem = problems[0]
    match problem["type"]:
        case "missing":
            return "is required"
        case "extra_forbidden":
            return explain_unknown_field(field)
        case kind if kind == "value_error" or not _SHOULD.match(problem["msg"]):
            return problem["msg"].removeprefix("Value error, ")
        case kind:
            expected = [_describe_expected(each) for each in problems]
            others = "".join(f" or {other.removeprefix('be ')}" for other in expected[1:])
            return f"must {expected[0]}{others}, found {_describe_found(kind, problem['input'])}"


def _describe_expected(problem: ErrorDetails) -> str:
    """Return what the value must do, such as `be greater than 0` or `have at least 1 item`."""
    type_name, _, error = problem["type"].partition("_")
    if error in _TYPE_ERRORS and type_name in _TYPES:
        return f"be {_TYPES[type_name]}"
    return _SHOULD.sub("", problem["msg"]).split(" after validation")[0]


def _describe_found(kind: str, value: Any) -> str:
    """Return the value found, or only its type if it may be a secret: a value of `env`, an argument or a token."""
    type_name = kind.partition("_")[0]
    match value:
        case None:
            return "nothing"
        case str() if kind.startswith("string_too"):
            return str(len(value))
        case str():
            is_quotable = type_name not in ("dict", "model", "tuple") and len(value) <= _MAX_QUOTED_LENGTH
            return json.dumps(value, ensure_ascii=False) if is_quotable else "a string"
        case dict() | list() | tuple() if kind.startswith("too"):
            return str(len(value))
        case dict():
            return "an object"
        case list() | tuple():
            return "a list"
        case _ if type_name == "string":
            return f"{'true or false' if isinstance(value, bool) else 'a number'}: put it in quotes"
        case _:
            return json.dumps(value, default=str)


def _fold(name: str) -> str:
    """Return the name in a form in which learning_rate, learningrate and learningRate are equal."""
    return re.sub(r"[_-]", "", name).lower()
