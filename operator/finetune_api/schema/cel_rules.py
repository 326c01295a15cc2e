"""Defines the CEL rules of the CRD: name rules, cross-field rules and transition rules."""

from finetune_api.v1alpha1.base import CelRule
from finetune_api.v1alpha1.job import MAX_JOB_NAME, FineTuneJobSpec
from finetune_api.v1alpha1.name_types import JOB_NAME_PATTERN
from finetune_api.v1alpha1.spec_rules import SPEC_RULES

MUTABLE = (
    "suspend",
    "cancel",
    "ttlSecondsAfterFinished",
    "activeDeadlineSeconds",
    "pendingDeadlineSeconds",
    "startupDeadlineSeconds",
    "restartPolicy",
)
MUTABLE_WHILE_SUSPENDED = (
    "numNodes",
    "nprocPerNode",
    "resources",
    "shmSize",
    "image",
    "imagePullPolicy",
    "imagePullSecrets",
    "podTemplate",
    "scheduling",
    "network",
)


def list_name_rules() -> tuple[CelRule, ...]:
    """Return the rules for metadata.name, from which Service and pod names are derived."""
    return (
        CelRule(
            f"self.metadata.name.size() <= {MAX_JOB_NAME}",
            f"metadata.name must have at most {MAX_JOB_NAME} characters, so that the names of its pods fit 63",
            f"'metadata.name must have at most {MAX_JOB_NAME} characters, so that the names of its pods fit 63;"
            " this one has %d'.format([self.metadata.name.size()])",
        ),
        CelRule(
            f"self.metadata.name.matches('{JOB_NAME_PATTERN}')",
            "metadata.name must start with a lower case letter, contain only a-z, 0-9 and '-', and not end with '-'"
            " (DNS-1035), because a Service is named after it",
        ),
    )


def list_spec_rules() -> tuple[CelRule, ...]:
    """Return the cross-field rules of the spec."""
    return tuple(cel_rule for rule in SPEC_RULES for cel_rule in rule.cel_rules)


def list_transition_rules() -> tuple[CelRule, ...]:
    """Return the rules that make fields immutable, always or while the job runs."""
    return (*_list_immutability_rules(), *_list_suspension_rules(), _build_world_size_rule())


def _list_immutability_rules() -> tuple[CelRule, ...]:
    fields = (field.alias or name for name, field in FineTuneJobSpec.model_fields.items())
    return tuple(
        CelRule(
            _build_unchanged_expression(field),
            f"spec.{field} is immutable; delete and recreate the job, or create another one",
            field_path=f".{field}",
        )
        for field in fields
        if field not in (*MUTABLE, *MUTABLE_WHILE_SUSPENDED)
    )


def _list_suspension_rules() -> tuple[CelRule, ...]:
    return tuple(
        CelRule(
            f"(has(oldSelf.suspend) && oldSelf.suspend) || ({_build_unchanged_expression(field)})",
            f"spec.{field} can be changed only while the job is suspended; set spec.suspend to true first",
            field_path=f".{field}",
        )
        for field in MUTABLE_WHILE_SUSPENDED
    )


def _build_world_size_rule() -> CelRule:
    """Return the rule that the effective batch of a trainer job stays the same if its number of ranks changes."""
    is_unchanged = " && ".join(f"({_build_unchanged_expression(field)})" for field in ("numNodes", "nprocPerNode"))
    return CelRule(
        f"({is_unchanged}) || has(self.command) || (has(self.training) && has(self.training.globalBatchSize))",
        "spec.numNodes and spec.nprocPerNode can be changed only in a job with training.globalBatchSize, because"
        " otherwise the effective batch would change, too; create another job",
        field_path=".numNodes",
    )


def _build_unchanged_expression(field_name: str) -> str:
    """Return a CEL expression that is true if the field is unchanged.

    The API server estimates the cost of the equivalent `self.?x == oldSelf.?x` as unbounded.
    """
    value, old_value = f"self.{field_name}", f"oldSelf.{field_name}"
    return f"has({value}) ? has({old_value}) && {value} == {old_value} : !has({old_value})"
