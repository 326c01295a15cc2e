"""Base classes of the API models: camelCase in JSON, snake_case in Python, frozen; and the rules between fields."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar

from pydantic import BaseModel, ConfigDict, StringConstraints, model_validator

from finetune_supervisor.contract import to_camel

NonEmpty = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
M = TypeVar("M")


# Of the dataclasses that add validation to a message of the supervisor; like a StatusModel they ignore unknown fields.
MESSAGE_CONFIG = ConfigDict(alias_generator=to_camel, validate_by_name=True, extra="ignore")


class Model(BaseModel):
    """Base of all objects of the resource; unknown fields are errors, as in strict validation of the API server."""

    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True, frozen=True, extra="forbid")

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Return the object itself, which is immutable: copying every default took half of the parsing time."""
        return self


class StatusModel(Model):
    """Base of all objects of the status; unknown fields are dropped, so that an older operator can read newer ones."""

    model_config = ConfigDict(extra="ignore")


@dataclass(frozen=True)
class CelRule:
    """One CEL rule with its message. `detail` is a CEL expression for a message that contains the values found."""

    rule: str
    message: str
    detail: str | None = None
    field_path: str | None = None

    def as_schema(self) -> dict[str, Any]:
        """Return the rule as an item of x-kubernetes-validations."""
        keys = {
            "rule": self.rule,
            "message": self.message,
            "messageExpression": self.detail,
            "fieldPath": self.field_path,
        }
        return {key: value for key, value in keys.items() if value is not None}


@dataclass(frozen=True)
class CrossFieldRule(Generic[M]):
    """A rule between fields of the model M: its check in Python, next to the same check in CEL.

    `check` returns the problem, or None; it is None if a nested model has the check. `not_in_cel` names what the CEL
    rules do not check, with the reason; it is required without CEL rules.
    """

    name: str
    check: Callable[[M], str | None] | None
    cel: tuple[CelRule, ...] = ()
    not_in_cel: str = ""

    @classmethod
    def with_message(
        cls, name: str, is_violated: Callable[[M], bool], cel: CelRule, not_in_cel: str = ""
    ) -> "CrossFieldRule[M]":
        """Return a rule whose check has the message of its CEL rule."""
        return cls(name, lambda model: cel.message if is_violated(model) else None, (cel,), not_in_cel)


def _add_cel_rules(schema: dict[str, Any], model: "type[RuledModel]") -> None:
    schema.update(validations(cel for rule in model.rules for cel in rule.cel))


class RuledModel(Model):
    """Base of objects with rules between their fields: the model and the API server check each of `rules`."""

    model_config = ConfigDict(json_schema_extra=_add_cel_rules)
    rules: ClassVar[tuple[CrossFieldRule[Any], ...]]

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        for rule in self.rules:
            if rule.check is not None and (problem := rule.check(self)):
                raise ValueError(problem)
        return self


def validations(rules: Iterable[CelRule]) -> dict[str, Any]:
    """Return the JSON schema extra with CEL rules for the API server; empty without rules."""
    schemas = [rule.as_schema() for rule in rules]
    return {"x-kubernetes-validations": schemas} if schemas else {}


def list_map(key: str) -> dict[str, Any]:
    """Return the JSON schema extra that makes server-side apply merge list items by `key`, which must be unique."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
