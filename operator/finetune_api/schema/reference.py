"""The reference page, made from the models and the rules; nothing here does I/O."""

from collections.abc import Iterable, Iterator

from finetune_api.schema.cel_rules import MUTABLE, MUTABLE_WHILE_SUSPENDED, Rule, name_rules, spec_rules
from finetune_api.schema.json_schema import Schema, fields, inline_schema, text_of_default
from finetune_api.v1alpha1.job import GROUP, KIND, VERSION, FineTuneJobSpec
from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import JobStatus, Phase

CONDITIONS = {
    "Running": "True while every node of the attempt runs.",
    "Suspended": "True when `spec.suspend` is set and no pod is left.",
    "Complete": "True at the end of a job whose result is whole; its marker was seen.",
    "Failed": "True at the end of a job that is not tried again.",
    "Finished": "True at either end.",
    "Reconciling": "True until the pods run, as kstatus, Helm and Flux expect.",
    "Stalled": "True with `Failed`, as kstatus expects.",
}
IMMUTABLE_WORDS = ("is immutable", "can be changed only")


def render_reference() -> str:
    """Markdown: fields of spec and status, rules between fields, conditions and phases."""
    return "\n".join(
        (
            f"# {KIND} reference",
            "",
            f"`apiVersion: {GROUP}/{VERSION}`, `kind: {KIND}`. The same text is in `kubectl explain ftj.spec`; "
            "[finetunejob.schema.json](../../manifests/finetunejob.schema.json) lets editors check a job file.",
            "",
            "## Spec",
            "",
            *_field_table(inline_schema(FineTuneJobSpec), defaults=True),
            "",
            "### What may change",
            "",
            f"{_code(MUTABLE)} at any time, and {_code(MUTABLE_WHILE_SUSPENDED)} while the job is suspended. Everything"
            " else is fixed when the job is created.",
            "",
            "### Rules between fields",
            "",
            *_rule_list((*name_rules(), *spec_rules())),
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
            "While pods wait for something else, the condition gives Kubernetes' own word for it.",
            "",
            f"`phase` is one word for people, never for programs: {', '.join(Phase)}.",
            "",
        )
    )


def _reason_table() -> Iterator[str]:
    columns = ("reason", "fault", "what it means")
    yield _row(columns)
    yield _row("---" for _ in columns)
    for reason in Reason:
        yield _row((f"`{reason}`", reason.fault or "", reason.meaning))


def _field_table(schema: Schema, *, defaults: bool) -> Iterator[str]:
    columns = ("field", "type", "default", "what it is") if defaults else ("field", "type", "what it is")
    yield _row(columns)
    yield _row("---" for _ in columns)
    for path, field, required in fields(schema):
        default = "required" if required else _literal(text_of_default(field))
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
    """`(0, 1]` as mathematicians write it; one-sided bounds in words of ASCII."""
    lowest, above = field.get("minimum"), field.get("exclusiveMinimum")
    highest, below = field.get("maximum"), field.get("exclusiveMaximum")
    lower = f"> {above}" if above is not None else f">= {lowest}" if lowest is not None else ""
    upper = f"< {below}" if below is not None else f"<= {highest}" if highest is not None else ""
    bounds = ", ".join(bound for bound in (lower, upper) if bound)
    return f" {bounds}" if bounds else ""


def _rule_list(rules: Iterable[Rule]) -> Iterator[str]:
    for rule in rules:
        if not any(words in rule.message for words in IMMUTABLE_WORDS):
            yield f"- {rule.message}."


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _literal(text: str) -> str:
    return f"`{text}`" if text else ""


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
