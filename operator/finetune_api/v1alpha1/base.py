"""The base of every model in the contract: camelCase outside, snake_case inside, frozen, no unknown fields."""

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, StringConstraints

NonEmpty = Annotated[str, StringConstraints(min_length=1, max_length=1024)]


def to_camel(name: str) -> str:
    """`p2p_disable` -> `p2pDisable`; pydantic's own generator would write `p2PDisable`."""
    first, *rest = name.split("_")
    return first + "".join(part[:1].upper() + part[1:] for part in rest)


class Model(BaseModel):
    """One object of the resource; unknown fields are errors, as the API server's strict validation has it."""

    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True, frozen=True, extra="forbid")

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Itself, because it never changes: pydantic copies every default, which took half the time of a parse."""
        return self


class StatusModel(Model):
    """One object of the status; unknown fields are dropped, so that an older operator can read a newer one's."""

    model_config = ConfigDict(extra="ignore")


def validations(*rules: tuple[str, str]) -> dict[str, Any]:
    """JSON schema extra: CEL rules that the API server checks, each with the message its user reads."""
    return {"x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in rules]}


def list_map(key: str) -> dict[str, Any]:
    """JSON schema extra: server-side apply merges the list's items by `key`, which must be unique."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
