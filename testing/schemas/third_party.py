"""Schemas of objects of other projects, which reject unknown fields; each YAML file of this folder names its source."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

Schema = dict[str, Any]

FOLDER = Path(__file__).parent
GROUP_NAME = "the name of the PodGroup"


@dataclass(frozen=True)
class ThirdPartySchema:
    """Schema of the spec of a kind, and the fields of pods that belong to an object of that kind."""

    api_version: str
    kind: str
    spec: Schema
    pod: Schema = field(default_factory=dict)

    def find_problems(self, document: Schema) -> Iterator[str]:
        """Yield an error message for each field that the API server would reject or drop."""
        if (document["apiVersion"], document["kind"]) != (self.api_version, self.kind):
            yield f"{document['apiVersion']} {document['kind']} instead of {self.api_version} {self.kind}"
        for name in sorted(document.keys() - {"apiVersion", "kind", "metadata", "spec"}):
            yield f"{name}: unknown field"
        for error in Draft202012Validator(_make_strict(self.spec)).iter_errors(document["spec"]):
            yield f"spec.{'.'.join(str(part) for part in error.path)}: {error.message}"

    def find_pod_problems(self, pod: Schema, group_name: str) -> Iterator[str]:
        """Yield each field by which a pod would not belong to the group of this name."""
        metadata = pod["metadata"]
        found = {
            "labels": metadata.get("labels", {}),
            "annotations": metadata.get("annotations", {}),
            "spec": pod["spec"],
        }
        if self.pod.get("scheduler", pod["spec"].get("schedulerName")) != pod["spec"].get("schedulerName"):
            yield f"spec.schedulerName: {pod['spec'].get('schedulerName')} instead of {self.pod['scheduler']}"
        for part in ("labels", "annotations", "spec"):
            for key, value in _replace_name(self.pod.get(part, {}), group_name).items():
                if found[part].get(key) != value:
                    yield f"{part}.{key}: {found[part].get(key)} instead of {value}"


def load_schema(name: str) -> ThirdPartySchema:
    """Load one file of this folder."""
    document = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    return ThirdPartySchema(document["apiVersion"], document["kind"], document["spec"], document.get("pod", {}))


def _replace_name(value: Any, group_name: str) -> Any:
    if isinstance(value, dict):
        return {key: _replace_name(child, group_name) for key, child in value.items()}
    return group_name if value == GROUP_NAME else value


def _make_strict(schema: Schema) -> Schema:
    strict = dict(schema)
    if "properties" in schema:
        strict["properties"] = {name: _make_strict(child) for name, child in schema["properties"].items()}
        strict["additionalProperties"] = False
    if isinstance(schema.get("items"), dict):
        strict["items"] = _make_strict(schema["items"])
    return strict
