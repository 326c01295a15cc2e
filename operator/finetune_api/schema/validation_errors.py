"""Converts pydantic's errors to messages for users, with suggestions for misspelled fields."""

import json
import re
from difflib import get_close_matches
from functools import cache
from itertools import islice
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from finetune_api.schema.json_schema import Schema, inline_schema, iterate_fields
from finetune_api.v1alpha1.job import FineTuneJobSpec

Location = tuple[int | str, ...]

JOB_FIELDS = ("apiVersion", "kind", "metadata", "spec", "status")
# cutoff for difflib: `loraa` matches `lora` and `nodes` matches `numNodes`, but `method` does not match `model`
_SIMILARITY_CUTOFF = 0.7
_MAX_QUOTED_CHARACTERS = 40
MAX_PROBLEMS = 100  # that are explained, because a search for a similar field takes a millisecond
# YAML terms for the type names in pydantic's errors
_TYPE_DESCRIPTIONS = {
    "bool": "true or false",
    "dict": "an object",
    "float": "a number",
    "int": "an integer",
    "model": "an object",
    "string": "a string",
    "tuple": "a list",
}
_SHOULD_PREFIX = re.compile(r"^\w+ should ")
_TYPE_ERRORS = ("type", "parsing", "from_float", "attributes_type")


def explain_validation_error(error: ValidationError, *, parent_path: str = "") -> str:
    """Return all problems as one line, such as `spec.numNodes: ...; spec.model: ...`."""
    return "; ".join(explain_invalid_fields(error, parent_path=parent_path))


def explain_invalid_fields(error: ValidationError, *, parent_path: str = "") -> tuple[str, ...]:
    """Return one message per invalid field, for at most MAX_PROBLEMS of them.

    `parent_path` is the path of the validated object in the job, such as `spec`, or empty for a whole job.
    """
    problems = error.errors(include_url=False, include_context=False)
    parent_locations = {problem["loc"][:depth] for problem in problems for depth in range(len(problem["loc"]))}
    problems_by_field: dict[Location, list[ErrorDetails]] = {}
    for problem in problems:
        # skip the too_short error of a list with invalid items, which pydantic does not count
        if not (problem["type"] == "too_short" and problem["loc"] in parent_locations):
            problems_by_field.setdefault(
                _remove_union_member((parent_path, *problem["loc"]) if parent_path else problem["loc"]), []
            ).append(problem)
    return tuple(
        f"{_format_path(location)}: {_explain_problems(location, field_problems)}"
        for location, field_problems in islice(problems_by_field.items(), MAX_PROBLEMS)
    )


def explain_unknown_field(location: Location) -> str:
    """Return the message for an unknown field, with a suggestion if the job has a similar field."""
    parent, name = location[:-1], _normalize_name(str(location[-1]))
    siblings = {
        _normalize_name(sibling): _format_path((*parent, sibling))
        for sibling in _find_schemas(parent)[-1].get("properties", ())
    }
    similar_names = [name] if name in siblings else get_close_matches(name, siblings, n=2, cutoff=_SIMILARITY_CUTOFF)
    paths_elsewhere = [
        path for path, _, _ in iterate_fields(_build_job_schema()) if _normalize_name(path.rpartition(".")[2]) == name
    ]
    suggestions = [siblings[name] for name in similar_names] or (paths_elsewhere if len(paths_elsewhere) == 1 else [])
    return f"unknown field; did you mean {' or '.join(suggestions)}?" if suggestions else "unknown field"


@cache
def _build_job_schema() -> Schema:
    return {"properties": {**{field: {} for field in JOB_FIELDS}, "spec": inline_schema(FineTuneJobSpec)}}


def _find_schemas(location: Location) -> list[Schema]:
    """Return the schemas along the path from the job to `location`; unknown fields have the schema {}."""
    schemas = [_build_job_schema()]
    for part in location:
        children = schemas[-1].get("items" if isinstance(part, int) else "properties", {})
        child = children if isinstance(part, int) else children.get(part, schemas[-1].get("additionalProperties"))
        schemas.append(child if isinstance(child, dict) else {})
    return schemas


def _remove_union_member(location: Location) -> Location:
    """Remove the name of the union member, which pydantic appends to the location of a field."""
    for depth, schema in enumerate(_find_schemas(location)):
        if "x-kubernetes-int-or-string" in schema:  # the job schema has no other unions
            return location[:depth]
    return location


def _format_path(location: Location) -> str:
    """Return the path in the notation of kubectl, such as `spec.dataset.train[0].name`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")


def _explain_problems(location: Location, problems: list[ErrorDetails]) -> str:
    """Return the message for one field. Only a field with a union type can have several problems."""
    problem = problems[0]
    match problem["type"]:
        case "missing":
            return "is required"
        case "extra_forbidden":
            return explain_unknown_field(location)
        case error_type if error_type == "value_error" or not _SHOULD_PREFIX.match(problem["msg"]):
            return problem["msg"].removeprefix("Value error, ")
        case error_type:
            expectations = [_describe_expected_value(union_problem) for union_problem in problems]
            alternatives = "".join(f" or {other.removeprefix('be ')}" for other in expectations[1:])
            return f"must {expectations[0]}{alternatives}, found {_describe_found_value(error_type, problem['input'])}"


def _describe_expected_value(problem: ErrorDetails) -> str:
    """Return the expectation as a verb phrase, such as `be greater than 0` or `have at least 1 item`."""
    type_name, _, error = problem["type"].partition("_")
    if error in _TYPE_ERRORS and type_name in _TYPE_DESCRIPTIONS:
        return f"be {_TYPE_DESCRIPTIONS[type_name]}"
    return _SHOULD_PREFIX.sub("", problem["msg"]).split(" after validation")[0]


def _describe_found_value(error_type: str, value: Any) -> str:
    """Describe the invalid value, or only its type if the value may be a secret, such as a value of `env`."""
    type_name = error_type.partition("_")[0]
    match value:
        case None:
            return "nothing"
        case str() if error_type.startswith("string_too"):
            return str(len(value))
        case str():
            is_quotable = type_name not in ("dict", "model", "tuple") and len(value) <= _MAX_QUOTED_CHARACTERS
            return json.dumps(value, ensure_ascii=False) if is_quotable else "a string"
        case dict() | list() | tuple() if error_type.startswith("too"):
            return str(len(value))
        case dict():
            return "an object"
        case list() | tuple():
            return "a list"
        case _ if type_name == "string":
            return f"{'true or false' if isinstance(value, bool) else 'a number'}: put it in quotes"
        case _:
            return json.dumps(value, default=str)


def _normalize_name(name: str) -> str:
    """Return the name in lower case without separators, so that learning_rate equals learningRate."""
    return re.sub(r"[_-]", "", name).lower()
