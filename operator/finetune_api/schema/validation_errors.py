"""What is wrong with a job, in words for its author: which field, what it must be, what was seen, what was meant."""

import json
import re
from difflib import get_close_matches
from functools import cache
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from finetune_api.schema.json_schema import Schema, fields, inline_schema
from finetune_api.v1alpha1.job import FineTuneJobSpec

Location = tuple[int | str, ...]

JOB_FIELDS = ("apiVersion", "kind", "metadata", "spec", "status")
_LIKENESS = 0.7  # of difflib: loraa and nodes are told to be lora and numNodes, method is not told to be model
_LONGEST_SHOWN = 40  # characters
# pydantic's kinds of type, in the words of YAML
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
_OF_A_TYPE = ("type", "parsing", "from_float", "attributes_type")


def explain(error: ValidationError, *, within: str = "") -> str:
    """`spec.numNodes: ...; spec.model: ...`: where, and what is wrong there."""
    return "; ".join(explain_each(error, within=within))


def explain_each(error: ValidationError, *, within: str = "") -> tuple[str, ...]:
    """One line per field that is wrong; `within` is the field of the job that was validated, empty for a whole job."""
    problems = error.errors(include_url=False, include_context=False)
    blamed = {problem["loc"][:depth] for problem in problems for depth in range(len(problem["loc"]))}
    told: dict[Location, list[ErrorDetails]] = {}
    for problem in problems:
        # pydantic does not count items that are wrong themselves
        if not (problem["type"] == "too_short" and problem["loc"] in blamed):
            told.setdefault(_field((within, *problem["loc"]) if within else problem["loc"]), []).append(problem)
    return tuple(f"{_write(field)}: {_what(field, each)}" for field, each in told.items())


def explain_unknown(field: Location) -> str:
    """`unknown field`, and which was meant: what looks like it beside it, else the only one of its name elsewhere."""
    parent, name = field[:-1], _fold(str(field[-1]))
    beside = {_fold(known): _write((*parent, known)) for known in _follow(parent)[-1].get("properties", ())}
    like = [name] if name in beside else get_close_matches(name, beside, n=2, cutoff=_LIKENESS)
    elsewhere = [path for path, _, _ in fields(_job()) if _fold(path.rpartition(".")[2]) == name]
    meant = [beside[each] for each in like] or (elsewhere if len(elsewhere) == 1 else [])
    return f"unknown field; did you mean {' or '.join(meant)}?" if meant else "unknown field"


@cache
def _job() -> Schema:
    return {"properties": {**{field: {} for field in JOB_FIELDS}, "spec": inline_schema(FineTuneJobSpec)}}


def _follow(location: Location) -> list[Schema]:
    """The schemas from the job down to `location`; empty ones where nothing is known."""
    nodes = [_job()]
    for part in location:
        inside = nodes[-1].get("items" if isinstance(part, int) else "properties", {})
        child = inside if isinstance(part, int) else inside.get(part, nodes[-1].get("additionalProperties"))
        nodes.append(child if isinstance(child, dict) else {})
    return nodes


def _field(location: Location) -> Location:
    """Without the member of a union that pydantic tried, which is no field."""
    for depth, node in enumerate(_follow(location)):
        if "x-kubernetes-int-or-string" in node:  # the only unions there are
            return location[:depth]
    return location


def _write(field: Location) -> str:
    """`spec.dataset.train[0].name`, as kubectl writes it."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in field).removeprefix(".")


def _what(field: Location, problems: list[ErrorDetails]) -> str:
    """Several problems are one for each member of a union."""
    problem = problems[0]
    match problem["type"]:
        case "missing":
            return "is required"
        case "extra_forbidden":
            return explain_unknown(field)
        case kind if kind == "value_error" or not _SHOULD.match(problem["msg"]):
            return problem["msg"].removeprefix("Value error, ")
        case kind:
            wanted = [_wanted(each) for each in problems]
            others = "".join(f" or {other.removeprefix('be ')}" for other in wanted[1:])
            return f"must {wanted[0]}{others}, found {_found(kind, problem['input'])}"


def _wanted(problem: ErrorDetails) -> str:
    """`be greater than 0`, `have at least 1 item`."""
    of, _, what = problem["type"].partition("_")
    if what in _OF_A_TYPE and of in _TYPES:
        return f"be {_TYPES[of]}"
    return _SHOULD.sub("", problem["msg"]).split(" after validation")[0]


def _found(kind: str, value: Any) -> str:
    """What was written, or only its type where it may be a secret: a value of `env`, an argument, a token."""
    of = kind.partition("_")[0]
    match value:
        case None:
            return "nothing"
        case str() if kind.startswith("string_too"):
            return str(len(value))
        case str():
            shown = of not in ("dict", "model", "tuple") and len(value) <= _LONGEST_SHOWN
            return json.dumps(value, ensure_ascii=False) if shown else "a string"
        case dict() | list() | tuple() if kind.startswith("too"):
            return str(len(value))
        case dict():
            return "an object"
        case list() | tuple():
            return "a list"
        case _ if of == "string":
            return f"{'true or false' if isinstance(value, bool) else 'a number'}: put it in quotes"
        case _:
            return json.dumps(value, default=str)


def _fold(name: str) -> str:
    """learning_rate and learningrate are learningRate."""
    return re.sub(r"[_-]", "", name).lower()
