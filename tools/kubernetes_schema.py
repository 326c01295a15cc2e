"""Strict OpenAPI schema of Kubernetes, which rejects unknown fields."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonschema import Draft4Validator

from testing.cluster.host.cache import Cache
from testing.cluster.host.commands import run
from testing.cluster.host.versions import PINNED

Schema = dict[str, Any]

_NUMBER_OR_STRING = {"type": ["string", "integer", "number"]}


@dataclass(frozen=True)
class KubernetesSchema:
    """OpenAPI definitions by name, and definition names by API version and kind."""

    definitions: Schema
    kinds: dict[tuple[str, str], str]

    def find_problems(self, document: Schema) -> Iterator[str]:
        """Yield an error message for each field that the API server would reject or drop."""
        version, kind = document.get("apiVersion", ""), document.get("kind", "")
        if (version, kind) not in self.kinds:
            yield f"{version} {kind}: no such kind in Kubernetes {PINNED.kubernetes}"
            return
        schema = {"$ref": f"#/definitions/{self.kinds[version, kind]}", "definitions": self.definitions}
        name = document.get("metadata", {}).get("name")
        for error in Draft4Validator(schema).iter_errors(document):
            yield f"{kind} {name}: {'.'.join(str(part) for part in error.path)}: {error.message[:300]}"


def load_kubernetes_schema() -> KubernetesSchema | None:
    """Load the schema from the Go module of Kubernetes; return None if it is missing and Go is not installed."""
    cache = Cache.from_environment()
    module = Path(cache.go_environment["GOMODCACHE"]) / f"k8s.io/kubernetes@v{PINNED.kubernetes}"
    if not module.exists():
        if shutil.which("go") is None:
            return None
        cache.root.mkdir(parents=True, exist_ok=True)
        command = ("go", "mod", "download", f"k8s.io/kubernetes@v{PINNED.kubernetes}")
        run(*command, cwd=cache.root, environment=cache.go_environment)
    return parse_openapi(json.loads((module / "api" / "openapi-spec" / "swagger.json").read_text()))


def parse_openapi(document: Schema) -> KubernetesSchema:
    """Parse the OpenAPI document so that objects reject unknown fields and quantities accept numbers and strings."""
    definitions = {name: _make_strict(name, schema) for name, schema in document["definitions"].items()}
    kinds = {
        (f"{gvk['group']}/{gvk['version']}".lstrip("/"), gvk["kind"]): name
        for name, schema in document["definitions"].items()
        for gvk in schema.get("x-kubernetes-group-version-kind", ())
    }
    return KubernetesSchema(definitions, kinds)


def _make_strict(name: str, schema: Schema) -> Schema:
    if schema.get("format") == "int-or-string" or name.endswith(".resource.Quantity"):
        return _NUMBER_OR_STRING
    strict = dict(schema)
    if "properties" in schema:
        strict["properties"] = {field: _make_strict("", child) for field, child in schema["properties"].items()}
        strict["additionalProperties"] = False
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            strict[key] = _make_strict("", schema[key])
    return strict
