"""Converts a text of any supported kind to a job that passes the validation of the operator."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from pydantic import ValidationError

from finetune_api.schema.json_schema import Schema, inline_schema
from finetune_api.schema.validation_errors import explain_invalid_fields
from finetune_api.v1alpha1.job import FineTuneJob, FineTuneJobSpec
from finetune_convert.conversion import (
    MAX_INPUT_BYTES,
    Conversion,
    ConversionError,
    ConversionRequest,
    Entry,
    EntryEffect,
    InputKind,
    Tree,
)
from finetune_convert.detect import detect_source, find_lines, find_mapping, load_documents
from finetune_convert.formats.axolotl import convert_axolotl
from finetune_convert.formats.kubeflow import convert_kubeflow
from finetune_convert.formats.llamafactory import convert_llamafactory
from finetune_convert.job_draft import API_VERSION, KIND, JobDraft
from finetune_convert.launch.launchers import Launch
from finetune_convert.mapping.tool_input import ToolInput
from finetune_convert.secret_values import contains_secret, redact
from finetune_convert.shell_input import convert_shell


def convert(text: str, request: ConversionRequest) -> Conversion:
    """Convert a command, a config or a manifest.

    Raises: ConversionError with one line per problem
    """
    _check_text(text)
    try:
        description, draft = _convert_text(text, request)
    except ConversionError as error:
        raise ConversionError(*map(redact, error.problems)) from None
    if request.tool_version is not None and not description.startswith("ms-swift"):
        raise ConversionError(f"--tool-version applies to ms-swift only; the input is {description}")
    job = _build_job(draft)
    problems = (*find_problems(job), *_find_secrets(job["spec"], "spec"))
    if problems:
        raise ConversionError(*problems)
    return Conversion(description, job, tuple(_join_entries(draft.entries)))


def _check_text(text: str) -> None:
    if len(text.encode("utf-8", "replace")) > MAX_INPUT_BYTES:
        raise ConversionError(f"the input has more than {MAX_INPUT_BYTES} bytes; paste only the training command")
    if not text.strip():
        raise ConversionError("the input is empty")
    control = next((character for character in text if character < " " and character not in "\t\r\n\f"), None)
    if control is not None:
        raise ConversionError(f"the input contains the control character {control!r}; it must be text")


def _convert_text(text: str, request: ConversionRequest) -> tuple[str, JobDraft]:
    source = request.source
    is_yaml = source in (InputKind.LLAMAFACTORY, InputKind.AXOLOTL, InputKind.KUBEFLOW)
    mappings = find_mapping(text)
    if is_yaml and mappings is None and source is not InputKind.LLAMAFACTORY:
        load_documents(text)  # for its error message
        raise ConversionError(f"--from {source}: expected a YAML mapping")
    kind = source or detect_source(mappings)
    tool_input = ToolInput(request, Launch(()))
    match kind:
        case InputKind.LLAMAFACTORY if mappings:
            return convert_llamafactory(tool_input, mappings[0], find_lines(text))
        case InputKind.AXOLOTL:
            return convert_axolotl(tool_input, (mappings or [{}])[0], find_lines(text))
        case InputKind.KUBEFLOW:
            return convert_kubeflow(tool_input, mappings or [])
        case _:
            return convert_shell(text, request, tool=kind)


def _build_job(draft: JobDraft) -> Tree:
    spec = _order_fields(draft.spec, _build_spec_schema())
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": draft.name}, "spec": spec}


@cache
def _build_spec_schema() -> Schema:
    return inline_schema(FineTuneJobSpec)


def _order_fields(node: Any, schema: Schema) -> Any:
    """Return a part of a job with its fields in the order of the reference."""
    if isinstance(node, list):
        return [_order_fields(item, schema.get("items", {})) for item in node]
    properties = schema.get("properties", {})
    if not isinstance(node, dict) or not properties:
        return node
    names = [*(name for name in properties if name in node), *(name for name in node if name not in properties)]
    return {name: _order_fields(node[name], properties.get(name, {})) for name in names}


def find_problems(job: Tree) -> tuple[str, ...]:
    """Return the problems that the validation of the operator finds in a job."""
    try:
        FineTuneJob.model_validate_json(json.dumps(job), strict=True, by_alias=True, by_name=False)
    except ValidationError as error:
        return tuple(f"the converted job is not valid: {problem}" for problem in explain_invalid_fields(error))
    return ()


def _find_secrets(node: Any, path: str) -> Iterator[str]:
    """Yield a problem for each value that looks like a secret, wherever it was in the input."""
    if isinstance(node, str) and contains_secret(node):
        yield f"{path}: its value looks like a secret; remove it from the input, and set it by a variable"
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in children:
        yield from _find_secrets(child, f"{path}.{key}")


def _join_entries(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries without repetitions, in the order of lines; entries without a line come last."""
    redacted = (replace(entry, option=redact(entry.option), message=redact(entry.message)) for entry in entries)
    unique = list(dict.fromkeys(redacted))
    return sorted(unique, key=lambda entry: (entry.effect is not EntryEffect.NOTE, entry.line is None, entry.line or 0))
