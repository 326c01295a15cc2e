"""Renders the field reference from the models and the CEL rules."""

from collections.abc import Iterable, Iterator

from finetune_api.schema.cel_rules import MUTABLE, MUTABLE_WHILE_SUSPENDED, list_name_rules, list_spec_rules
from finetune_api.schema.json_schema import Schema, format_default, inline_schema, iterate_fields
from finetune_api.v1alpha1.job import GROUP, KIND, VERSION, FineTuneJobSpec
from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import JobStatus, Phase

CONDITIONS = {
    "Running": "True while all nodes of the attempt run.",
    "Suspended": "True if `spec.suspend` is set and all pods are gone.",
    "Complete": "True after a job succeeded and its success marker was found.",
    "Failed": "True after a job failed permanently.",
    "Finished": "True if the job is complete or failed.",
    "Reconciling": "True until the pods run, as kstatus, Helm and Flux expect.",
    "TrainerImageOutdated": "True while the job keeps an older trainer image than that of the operator.",
    "OperatorRestricted": "True while the operator lacks a right, or ignores the TTL of the job; reason and message"
    " name it.",
    "Stalled": "True with `Failed`, or with reason `ReconcileFailed` while the operator cannot reconcile the job.",
}
SCHEMA_URL = "https://github.com/finetune-operator/finetune-operator/blob/main/manifests/finetunejob.schema.json"


def render_reference() -> str:
    """Return the field reference of the FineTuneJob resource as Markdown."""
    return "\n".join(
        (
            f"# {KIND} reference",
            "",
            f"`apiVersion: {GROUP}/{VERSION}`, `kind: {KIND}`. `kubectl explain ftj.spec` shows the same text. "
            f"Editors can check a job file with [finetunejob.schema.json]({SCHEMA_URL}).",
            "",
            "## Spec",
            "",
            *_render_field_table(inline_schema(FineTuneJobSpec), with_defaults=True),
            "",
            "### Mutable fields",
            "",
            f"These fields can be changed at any time: {_format_names(MUTABLE)}.",
            "",
            f"These fields can be changed while the job is suspended: {_format_names(MUTABLE_WHILE_SUSPENDED)}.",
            "",
            "All other fields are immutable.",
            "",
            "### Rules between fields",
            "",
            *(f"- {rule.message}." for rule in (*list_name_rules(), *list_spec_rules())),
            "",
            "## Status",
            "",
            *_render_field_table(inline_schema(JobStatus), with_defaults=False),
            "",
            "### Conditions",
            "",
            *(f"- `{name}`: {text}" for name, text in CONDITIONS.items()),
            "",
            "### Reasons",
            "",
            *_render_reason_table(),
            "",
            "If pods wait for another reason, the condition contains the reason that Kubernetes reports.",
            "",
            f"`phase` is a summary for people; programs should read the conditions. Its values: {', '.join(Phase)}.",
            "",
        )
    )


def _render_reason_table() -> Iterator[str]:
    columns = ("reason", "fault", "meaning")
    yield _format_row(columns)
    yield _format_row("---" for _ in columns)
    for reason in Reason:
        yield _format_row((f"`{reason}`", reason.fault or "", reason.meaning))


def _render_field_table(schema: Schema, *, with_defaults: bool) -> Iterator[str]:
    columns = ("field", "type", "default", "description") if with_defaults else ("field", "type", "description")
    yield _format_row(columns)
    yield _format_row("---" for _ in columns)
    for path, field, required in iterate_fields(schema):
        default = "required" if required else _format_literal(format_default(field))
        description = field.get("description", "").replace("<", "&lt;")
        yield _format_row((f"`{path}`", _format_type(field), *((default,) if with_defaults else ()), description))


def _format_type(field_schema: Schema) -> str:
    if "enum" in field_schema:
        return " \\| ".join(str(value) for value in field_schema["enum"])
    if "x-kubernetes-int-or-string" in field_schema:
        return f"integer or {field_schema['pattern'].strip('^$')}" if "pattern" in field_schema else "quantity"
    if field_schema["type"] == "array":
        return f"list of {_format_type(field_schema['items'])}"
    if isinstance(field_schema.get("additionalProperties"), dict):
        return f"map of {_format_type(field_schema['additionalProperties'])}"
    return str(field_schema.get("format") or field_schema["type"]) + _format_bounds(field_schema)


def _format_bounds(field_schema: Schema) -> str:
    """Return the bounds in ASCII, such as ` > 0, <= 1`, or an empty string."""
    minimum, exclusive_minimum = field_schema.get("minimum"), field_schema.get("exclusiveMinimum")
    maximum, exclusive_maximum = field_schema.get("maximum"), field_schema.get("exclusiveMaximum")
    lower = (
        f"> {exclusive_minimum}" if exclusive_minimum is not None else f">= {minimum}" if minimum is not None else ""
    )
    upper = (
        f"< {exclusive_maximum}" if exclusive_maximum is not None else f"<= {maximum}" if maximum is not None else ""
    )
    bounds = ", ".join(bound for bound in (lower, upper) if bound)
    return f" {bounds}" if bounds else ""


def _format_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _format_literal(text: str) -> str:
    return f"`{text}`" if text else ""


def _format_names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
