"""Builds the CustomResourceDefinition and the JSON schema for editors from the models."""

from typing import Any

from finetune_api.schema.cel_rules import list_name_rules, list_spec_rules, list_transition_rules
from finetune_api.schema.json_schema import Schema, build_editor_schema, build_structural_schema
from finetune_api.schema.status_schema import build_status_schema
from finetune_api.v1alpha1.base import build_validation_schema
from finetune_api.v1alpha1.job import GROUP, KIND, MAX_JOB_NAME, PLURAL, VERSION, FineTuneJob, FineTuneJobSpec
from finetune_api.v1alpha1.status import JobStatus

COLUMNS = (  # printer columns of `kubectl get ftj`
    ("Phase", "string", ".status.phase"),
    ("Nodes", "string", ".status.display.nodes"),
    ("Progress", "string", ".status.display.progress"),
    ("Loss", "string", ".status.display.loss"),
    ("Tokens/s", "string", ".status.display.tokensPerSecond"),
    ("ETA", "string", ".status.display.eta"),
    ("Restarts", "integer", ".status.restarts"),
    ("Age", "date", ".metadata.creationTimestamp"),
)
# The Running condition is always present; its message explains why a job is not running.
RUNNING_CONDITION = '.status.conditions[?(@.type=="Running")]'
WIDE_COLUMNS = (  # additional columns of `kubectl get ftj -o wide`
    ("Reason", "string", f"{RUNNING_CONDITION}.reason"),
    ("Queue", "string", ".status.display.queue"),
    ("Message", "string", f"{RUNNING_CONDITION}.message"),
)

SCALE = {  # for PodDisruptionBudgets with percentages or maxUnavailable (decisions/410)
    "specReplicasPath": ".spec.numNodes",
    "statusReplicasPath": ".status.replicas",
    "labelSelectorPath": ".status.selector",
}


def build_crd() -> dict[str, Any]:
    """Return the manifest of the CustomResourceDefinition."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["ftj"],
                "categories": ["finetune"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": _build_object_schema()},
                    "subresources": {"status": {}, "scale": SCALE},
                    "additionalPrinterColumns": [
                        *({"name": name, "type": kind, "jsonPath": path} for name, kind, path in COLUMNS),
                        *(
                            {"name": name, "type": kind, "jsonPath": path, "priority": 1}
                            for name, kind, path in WIDE_COLUMNS
                        ),
                    ],
                }
            ],
        },
    }


def build_json_schema() -> Schema:
    """Return the JSON schema of a job file for editors, without cross-field rules."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": KIND,
        "description": FineTuneJob.__doc__,
        "type": "object",
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "additionalProperties": False,
        "properties": {
            "apiVersion": {"const": f"{GROUP}/{VERSION}"},
            "kind": {"const": KIND},
            "metadata": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": MAX_JOB_NAME}},
            },
            "spec": build_editor_schema(FineTuneJobSpec),
            "status": build_editor_schema(JobStatus),
        },
    }


def _build_object_schema() -> Schema:
    return {
        "type": "object",
        "description": FineTuneJob.__doc__,
        "required": ["spec"],
        **build_validation_schema(list_name_rules()),
        "properties": {
            "apiVersion": {"type": "string", "description": f"{GROUP}/{VERSION}."},
            "kind": {"type": "string", "description": f"{KIND}."},
            "metadata": {"type": "object"},
            "spec": _build_spec_schema(),
            "status": build_status_schema(),
        },
    }


def _build_spec_schema() -> Schema:
    schema = build_structural_schema(FineTuneJobSpec, describe_defaults=True)
    del schema["x-kubernetes-validations"]  # the cross-field rules are added below, together with the transition rules
    # the scale subresource is unavailable for an object without a number of replicas
    schema["properties"]["numNodes"]["default"] = FineTuneJobSpec.model_fields["num_nodes"].default
    return {**schema, **build_validation_schema((*list_spec_rules(), *list_transition_rules()))}
