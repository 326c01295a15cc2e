"""Defines spec.dataset.chatTemplateKwargs, the variables that the job passes to the chat template."""

import json
import re
from typing import Annotated, Any

from pydantic import AfterValidator, Field

_MAX_JSON_LENGTH = 4096
# parameters of apply_chat_template in transformers, and variables that the trainer sets itself
_RESERVED = frozenset(
    [
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    ]
)


def describe_invalid_name(name: str) -> str | None:
    """Return why the trainer cannot pass a variable of this name to the chat template, or None."""
    if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]{0,63}", name):
        return "expected the name of a variable of the chat template, such as enable_thinking"
    return "is set by the trainer; remove it" if name in _RESERVED else None


def _check_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    for name, value in kwargs.items():
        if problem := describe_invalid_name(name):
            raise ValueError(f"{name}: {problem}")
        if not isinstance(value, bool | int | float | str):
            raise ValueError(f"{name}: must be a boolean, a number or a string")
    if len(json.dumps(kwargs)) > _MAX_JSON_LENGTH:
        raise ValueError(f"must have at most {_MAX_JSON_LENGTH} characters of JSON")
    return kwargs


# The CRD cannot restrict the values to scalars: structural schemas have no unions (decisions/519).
ChatTemplateKwargs = Annotated[
    dict[str, Any],
    Field(max_length=16, json_schema_extra={"x-kubernetes-preserve-unknown-fields": True}),
    AfterValidator(_check_kwargs),
]
