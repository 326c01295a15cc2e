"""Base classes of the API models and of their cross-field rules."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationInfo, model_validator

from finetune_supervisor.contract import to_camel

HubName = Literal["huggingface", "modelscope"]
NonEmpty = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
M = TypeVar("M")
BEGUN_JOB = {"has_begun": True}  # validation context of a job that has begun


def has_begun(info: ValidationInfo) -> bool:
    """Return whether the validated job has begun, so that it keeps values which a later rule forbids."""
    return bool((info.context or {}).get("has_begun"))


# Configuration of the dataclasses for supervisor messages, which ignore unknown fields like StatusModel.
MESSAGE_CONFIG = ConfigDict(alias_generator=to_camel, validate_by_name=True, extra="ignore")


class Model(BaseModel):
    """Base class of all API objects, which are frozen and use camelCase in JSON.

    Unknown fields are errors, as in strict validation of the API server.
    """

    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True, frozen=True, extra="forbid")

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Return the object itself: it is immutable, and deep copies of the defaults would double the parsing time."""
        return self


class StatusModel(Model):
    """Base class of all status objects.

    Unknown fields are dropped, so that an older operator can read the status of a newer one.
    """

    model_config = ConfigDict(extra="ignore")


@dataclass(frozen=True)
class CelRule:
    """CEL validation rule of the CRD, with the fields of x-kubernetes-validations."""

    rule: str
    message: str
    message_expression: str | None = None  # CEL expression for a message that contains the invalid value
    field_path: str | None = None

    def to_schema(self) -> dict[str, Any]:
        """Return the rule as an item of x-kubernetes-validations."""
        keys = {
            "rule": self.rule,
            "message": self.message,
            "messageExpression": self.message_expression,
            "fieldPath": self.field_path,
        }
        return {key: value for key, value in keys.items() if value is not None}


@dataclass(frozen=True)
class CrossFieldRule(Generic[M]):
    """Cross-field validation rule of the model M, implemented in Python and in CEL.

    `check` returns an error message or None; it is itself None if a nested model implements the check.
    `cel_limitations` explains which violations CEL cannot detect; it is required if there are no CEL rules.
    """

    name: str
    check: Callable[[M], str | None] | None
    cel_rules: tuple[CelRule, ...] = ()
    cel_limitations: str = ""

    @classmethod
    def from_cel_rule(
        cls, name: str, is_violated: Callable[[M], bool], cel_rule: CelRule, cel_limitations: str = ""
    ) -> "CrossFieldRule[M]":
        """Return a rule whose Python check returns the message of the CEL rule."""
        return cls(name, lambda model: cel_rule.message if is_violated(model) else None, (cel_rule,), cel_limitations)


def _add_cel_rules(schema: dict[str, Any], model: "type[ModelWithRules]") -> None:
    schema.update(build_validation_schema(cel_rule for rule in model.rules for cel_rule in rule.cel_rules))


class ModelWithRules(Model):
    """Base class of API objects with cross-field rules, which both the model and the API server check."""

    model_config = ConfigDict(json_schema_extra=_add_cel_rules)
    rules: ClassVar[tuple[CrossFieldRule[Any], ...]]

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        for rule in self.rules:
            if rule.check is not None and (problem := rule.check(self)):
                raise ValueError(problem)
        return self


def build_validation_schema(rules: Iterable[CelRule]) -> dict[str, Any]:
    """Return the x-kubernetes-validations key for the CEL rules, or {} if there are no rules."""
    schemas = [rule.to_schema() for rule in rules]
    return {"x-kubernetes-validations": schemas} if schemas else {}


def build_list_map_schema(*keys: str) -> dict[str, Any]:
    """Return the JSON schema keys that make server-side apply merge list items by the unique `keys`."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}
