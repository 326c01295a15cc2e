"""Builds messages and tools of rows in OpenAI format."""

import json
from typing import Any

Message = dict[str, Any]

WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str | None, **fields: Any) -> Message:
    return {"role": "assistant", "content": content, **fields}


def tool_result(content: str, **fields: Any) -> Message:
    return {"role": "tool", "content": content, **fields}


def weather_call(city: str = "Bern", *, as_text: bool = False) -> dict[str, Any]:
    """Build a call of WEATHER_TOOL, with the arguments as an object or as JSON text."""
    arguments = {"city": city}
    return {
        "type": "function",
        "function": {"name": "get_weather", "arguments": json.dumps(arguments) if as_text else arguments},
    }
