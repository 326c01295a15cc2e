"""Renders the field reference from the models and the CEL rules, without I/O."""

from collections.abc import Iterable, Iterator

from finetune_api.schema.cel_rules import MUTABLE, MUTABLE_WHILE_SUSPENDED, name_rules, spec_rules
from finetune_api.schema.json_schema import Schema, format_default, inline_schema, iterate_fields
from finetune_api.v1alpha1.job import GROUP, KIND, VERSION, FineTuneJobSpec
from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import JobStatus, Phase

CONDITIONS = {
    "Running": "True while all nodes of the attempt run.",
    "Suspended": "True if `spec.suspend` is set and all pods are gone.",
    "Complete": "True after a job succeeded; its success marker was found.",
    "Failed": "True after a job failed for good.",
    "Finished": "True if the job is complete or failed.",
    "Reconciling": "True until the pods run, as kstatus, Helm and Flux expect.",
    "Stalled": "True with `Failed`, as kstatus expects.",
}
SCHEMA_URL = "https://github.com/finetune-operator/finetune-operator/blob/main/manifests/finetunejob.schema.json"


def render_reference() -> str:
    """Return Markdown with the fields of spec and status, rules between fields, conditions, reasons and phases."""
    return "\n".join(
        (
            f"# {KIND} reference",
            "",
            f"`apiVersion: {GROUP}/{VERSION}`, `kind: {KIND}`. The same text is in `kubectl explain ftj.spec`; "
            f"[finetunejob.schema.json]({SCHEMA_URL}) lets editors check a job file.",
            "",
            "## Spec",
            "",
            *_field_table(inline_schema(FineTuneJobSpec), defaults=True),
            "",
            "### Mutable fields",
            "",
            f"{_code(MUTABLE)} can be changed at any time, {_code(MUTABLE_WHILE_SUSPENDED)} while the job is suspended."
            " All other fields are immutable.",
            "",
            "### Rules between fields",
            "",
            *(f"- {rule.message}." for rule in (*name_rules(), *spec_rules())),
            "",
            "## Status",
            "",
            *_field_table(inline_schema(JobStatus), defaults=False),
            "",
            "### Conditions",
            "",
            *(f"- `{name}`: {text}" for name, text in CONDITIONS.items()),
            "",
            "### Reasons",
            "",
            *_reason_table(),
            "",
            "While pods wait for another reason, the condition contains the reason that Kubernetes reports.",
            "",
            f"`phase` is a summary for people, programs should read the conditions: {', '.join(Phase)}.",
            "",
        )
    )


def _reason_table() -> Iterator[str]:
    columns = ("reason", "fault", "meaning")
    yield _row(columns)
    yield _row("---" for _ in columns)
    for reason in Reason:
        yield _row((f"`{reason}`", reason.fault or "", reason.meaning))


def _field_table(schema: Schema, *, defaults: bool) -> Iterator[str]:
    columns = ("field", "type", "default", "description") if defaults else ("field", "type", "description")
    yield _row(columns)
    yield _row("---" for _ in columns)
    for path, field, required in iterate_fields(schema):
        default = "required" if required else _literal(format_default(field))
        description = field.get("description", "").replace("<", "&lt;")
        yield _row((f"`{path}`", _type(field), *((default,) if defaults else ()), description))


def _type(field: Schema) -> str:
    if "enum" in field:
        return " \\| ".join(str(value) for value in field["enum"])
    if "x-kubernetes-int-or-string" in field:
        return f"integer or {field['pattern'].strip('^$')}" if "pattern" in field else "quantity"
    if field["type"] == "array":
        return f"list of {_type(field['items'])}"
    if isinstance(field.get("additionalProperties"), dict):
        return f"map of {_type(field['additionalProperties'])}"
    return str(field.get("format") or field["type"]) + _bounds(field)


def _bounds(field: Schema) -> str:
    """Return the bounds in ASCII, such as ` > 0, <= 1`, or an empty text."""
    minimum, exclusive_minimum = field.get("minimum"), field.get("exclusiveMinimum")
    maximum, exclusive_maximum = field.get("maximum"), field.get("exclusiveMaximum")
    lower = (
        f"> {exclusive_minimum}" if exclusive_minimum is not None else f">= {minimum}" if minimum is not None else ""
    )
    upper = (
        f"< {exclusive_maximum}" if exclusive_maximum is not None else f"<= {maximum}" if maximum is not None else ""
    )
    bounds = ", ".join(bound for bound in (lower, upper) if bound)
    return f" {bounds}" if bounds else ""


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _literal(text: str) -> str:
    return f"`{text}`" if text else ""


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
