"""Builds the manifest of a job from Python arguments."""

import builtins
import inspect
import symtable
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from finetune_api.schema.validation_errors import explain_invalid_fields
from finetune_api.v1alpha1.job import KIND, FineTuneJobSpec
from finetune_client.errors import ClientError
from finetune_client.manifest import InvalidManifest, parse_manifest
from finetune_operator.names import API_VERSION
from finetune_operator.observation.ownership import RawBody

GPU = "nvidia.com/gpu"
FUNCTION_DIR = "/etc/finetune-function"
FUNCTION_FILE = "main.py"
FUNCTION_VOLUME = "function"
MAX_SOURCE_BYTES = 900_000  # a ConfigMap has at most 1 MiB

Fields = Mapping[str, Any]  # spec fields, in snake_case as in Python or in camelCase as in YAML
DEFAULT_METHOD = "sft"


@dataclass(frozen=True)
class Machines:
    """The pods of a job: one per node, each with these GPUs, volumes and environment variables.

    volumes: mount path by the name of a PersistentVolumeClaim. spec: any other fields of the job's spec.
    """

    nodes: int = 1
    gpus: int = 0
    volumes: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    spec: Fields = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """What the operator's trainer trains. A string stands for the fields in brackets.

    model: model [name]. dataset: dataset [one source of training rows]. output: output [name of the claim].
    method: sft or dpo, or a mapping from one of these to its fields. lora: fields of lora; None trains all weights.
    training: fields of training.
    """

    model: str | Fields
    dataset: str | Fields
    output: str | Fields
    method: str | Fields = DEFAULT_METHOD
    lora: Fields | None = None
    training: Fields = field(default_factory=dict)


def build_training_job(name: str, recipe: Recipe, machines: Machines) -> RawBody:
    """Return the manifest of a job that the operator's trainer runs.

    Raises:
        InvalidManifest: A field is unknown, missing or invalid.
    """
    method = recipe.method
    spec: dict[str, Any] = {
        "model": _expand(recipe.model, lambda text: {"name": text}),
        "dataset": _expand(recipe.dataset, lambda text: {"train": [{"name": text}]}),
        "output": _expand(recipe.output, lambda text: {"persistentVolumeClaim": {"claimName": text}}),
        **({method: {}} if isinstance(method, str) else method),
        **({"lora": recipe.lora} if recipe.lora is not None else {}),
        **({"training": recipe.training} if recipe.training else {}),
    }
    return _build_manifest(name, spec, machines)


def build_function_job(
    name: str, function: Callable[..., object], arguments: Mapping[str, Any], *, image: str, machines: Machines
) -> tuple[RawBody, RawBody]:
    """Return a job that calls a Python function on every rank, and the ConfigMap with its source.

    The function needs no names from outside of its body: it imports what it uses. arguments: keyword arguments that
    are strings, numbers, booleans, None, or lists and dicts of these.

    Raises:
        ClientError: The source of the function is not available, or depends on names outside of it.
        InvalidManifest: A field is unknown, missing or invalid.
    """
    config_map_name = f"{name}-function"
    source = render_function(function, arguments)
    volume = {
        "name": FUNCTION_VOLUME,
        "mountPath": FUNCTION_DIR,
        "readOnly": True,
        "configMap": {"name": config_map_name},
    }
    spec = {
        "command": {"script": f"{FUNCTION_DIR}/{FUNCTION_FILE}"},
        "image": image,
        "volumes": [volume],
    }
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": config_map_name},
        "data": {FUNCTION_FILE: source},
    }
    return _build_manifest(name, spec, machines), config_map


def render_function(function: Callable[..., object], arguments: Mapping[str, Any]) -> str:
    """Return a program that defines the function and calls it.

    Raises:
        ClientError: The source is not available, too large, or depends on names outside of the function.
    """
    name = getattr(function, "__name__", repr(function))
    if not inspect.isfunction(function) or name == "<lambda>":
        raise ClientError(f"{name}: expected a function that is defined with def")
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError) as error:
        raise ClientError(f"{name}: its source is not available; define it in a file or a notebook cell") from error
    if source.startswith("@"):
        raise ClientError(f"{name} has a decorator, which its pods do not have; define it without")
    if outside := find_outside_names(source):
        names = ", ".join(outside)
        raise ClientError(f"{name} uses {names}, which its pods do not have; import or define it inside of {name}")
    _check_arguments(name, function, arguments)
    program = f"{source}\n\nif __name__ == '__main__':\n    {name}(**{dict(arguments)!r})\n"
    if len(program.encode()) > MAX_SOURCE_BYTES:
        raise ClientError(f"{name}: source and arguments exceed {MAX_SOURCE_BYTES} bytes; read the data from a volume")
    return program


def find_outside_names(source: str) -> tuple[str, ...]:
    """Return the names that the functions of a program use and neither define nor find in Python's builtins."""
    module = symtable.symtable(source, FUNCTION_FILE, "exec")
    defined = {symbol.get_name() for symbol in module.get_symbols() if symbol.is_assigned()}
    used: set[str] = set()
    tables = [module]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        used |= {
            symbol.get_name()
            for symbol in table.get_symbols()
            if symbol.is_referenced() and (table is module or symbol.is_global())
        }
    return tuple(sorted(used - defined - set(dir(builtins))))


def _check_arguments(name: str, function: Callable[..., object], arguments: Mapping[str, Any]) -> None:
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise ClientError(f"{name}: {error}") from error
    for key, value in arguments.items():
        if not _is_literal(value):
            raise ClientError(
                f"{name}: argument {key} is a {type(value).__name__}; expected strings, numbers, booleans, None, or"
                " lists and dicts of these"
            )


def _is_literal(value: object) -> bool:
    """Return whether the repr of a value is an expression for an equal value."""
    if isinstance(value, list | tuple):
        return all(map(_is_literal, value))
    if isinstance(value, dict):
        return all(_is_literal(key) and _is_literal(item) for key, item in value.items())
    if isinstance(value, float):
        return value == value and value not in (float("inf"), float("-inf"))
    return value is None or type(value) in (str, int, bool)


def _expand(value: object, build: Callable[[str], Any]) -> object:
    return build(value) if isinstance(value, str) else value


def _build_manifest(name: str, fields: dict[str, Any], machines: Machines) -> RawBody:
    spec = {
        **fields,
        "numNodes": machines.nodes,
        **({"resources": {"limits": {GPU: machines.gpus}}} if machines.gpus else {}),
        **machines.spec,
        "volumes": [*_list(fields, "volumes"), *_build_volumes(machines.volumes), *_list(machines.spec, "volumes")],
        "env": [*({"name": key, "value": value} for key, value in machines.env.items()), *_list(machines.spec, "env")],
    }
    try:
        parsed = FineTuneJobSpec.model_validate({key: value for key, value in spec.items() if value != []})
    except ValidationError as error:
        raise InvalidManifest(*explain_invalid_fields(error, parent_path="spec")) from error
    body = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name},
        "spec": parsed.model_dump(mode="json", by_alias=True, exclude_unset=True),
    }
    parse_manifest(body)
    return body


def _list(fields: Fields, key: str) -> Sequence[Any]:
    return fields.get(key) or ()


def _build_volumes(volumes: Mapping[str, str]) -> list[RawBody]:
    return [
        {"name": f"volume-{number}", "mountPath": path, "persistentVolumeClaim": {"claimName": claim}}
        for number, (claim, path) in enumerate(volumes.items())
    ]
