"""Base classes of the API models: camelCase in JSON, snake_case in Python, frozen, no unknown fields."""

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, StringConstraints

from finetune_supervisor.contract import to_camel

NonEmpty = Annotated[str, StringConstraints(min_length=1, max_length=1024)]


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


def validations(*rules: tuple[str, str]) -> dict[str, Any]:
    """Return the JSON schema extra with CEL rules for the API server, as pairs of rule and message."""
    return {"x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in rules]}


def list_map(key: str) -> dict[str, Any]:
    """Return the JSON schema extra that makes server-side apply merge list items by `key`, which must be unique."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
