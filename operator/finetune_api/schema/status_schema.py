"""Builds the schema of the status with bounds for all fields, and bounds a status before it is written.

Enumerations of the operator are plain strings in this schema: a newer operator must be able to write a new value while
the CRD is older. `kubectl explain` shows the known values in the descriptions.
"""

from functools import cache
from typing import Any

from finetune_api.bounded_text import truncate_text
from finetune_api.schema.json_schema import Schema, build_structural_schema
from finetune_api.untrusted_json import MAX_INTEGER
from finetune_api.v1alpha1.status import JobStatus
from finetune_api.visible_text import escape_controls

DEFAULT_MAX_LENGTH = 512
CONDITION_STATUS = ["True", "False", "Unknown"]  # defined by Kubernetes, so it remains an enumeration
# Before the first write, kstatus, Helm and Flux then consider the job as in progress instead of ready.
UNOBSERVED_STATUS = {"observedGeneration": -1}
# Texts that the failure rules read until an attempt has ended; core.attempt_record escapes them then.
RAW_FIELDS = ("evidence", "evidenceSummary")


@cache
def build_status_schema() -> Schema:
    """Return the structural schema of the status, in which every string, integer and list is bounded."""
    return {**_add_bounds(build_structural_schema(JobStatus, describe_defaults=False)), "default": UNOBSERVED_STATUS}


def bound_status(status: JobStatus) -> JobStatus:
    """Return the status with control characters escaped, texts truncated and integers limited to the schema."""
    body = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    bounded = bound_value(body, build_status_schema())
    return status if bounded == body else JobStatus.model_validate(bounded)


def bound_value(value: Any, schema: Schema, *, escapes: bool = True) -> Any:
    """Return the JSON value with texts, integers and lists within the bounds of the schema.

    escapes: whether control characters of texts become escapes, except in RAW_FIELDS.
    """
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        return {
            name: bound_value(child, properties.get(name, {}), escapes=escapes and name not in RAW_FIELDS)
            for name, child in value.items()
        }
    if isinstance(value, list):
        items = value[: schema.get("maxItems", len(value))]
        return [bound_value(item, schema.get("items", {}), escapes=escapes) for item in items]
    if isinstance(value, str):
        text = escape_controls(value) if escapes else value
        return truncate_text(text, schema["maxLength"]) if "maxLength" in schema else text
    if isinstance(value, int) and not isinstance(value, bool) and schema.get("type") == "integer":
        return min(max(value, schema["minimum"]), schema["maximum"])
    return value


def _add_bounds(schema: Schema) -> Schema:
    bounded = dict(schema)
    if schema.get("type") == "integer":
        bounded = {"minimum": 0, "maximum": MAX_INTEGER, **schema}
    elif schema.get("type") == "string" and "format" not in schema and schema.get("enum") != CONDITION_STATUS:
        if values := bounded.pop("enum", None):
            bounded["description"] = f"{schema['description']} Known values: {', '.join(values)}."
        bounded.setdefault("maxLength", DEFAULT_MAX_LENGTH)
    if "properties" in schema:
        bounded["properties"] = {name: _add_bounds(child) for name, child in schema["properties"].items()}
    if "items" in schema:
        bounded["items"] = _add_bounds(schema["items"])
    return bounded
